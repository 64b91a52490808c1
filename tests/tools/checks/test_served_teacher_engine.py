"""Laws of the role that serves the teacher of a run."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.config.algorithm import TeacherForm
from common.config.load import load_config
from common.config.model import ModelSection
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.host.machine import Gpu
from common.repository import ROOT
from common.store.run_dir import RunDir
from learner.teacher.scores import KEY_VARIABLE
from tools.checks.gpu_placement import GpuAssignment, used_gpus
from tools.checks.served_engines import teacher_engines
from tools.launch.base import RoleSpec
from tools.launch.roles import make_role_specs
from tools.launch.served import make_engine_specs, with_engines

GPUS = [Gpu(uuid=f"GPU-{n}", name="x", memory_bytes=80 << 30) for n in range(3)]
PLACED = GpuAssignment(learner=(0,), actors=((1,),))


BASE = load_config("teacher", [])
RUN_DIR = RunDir(root=ROOT / "runs" / "x")


def config_of(**changes: Any) -> RunConfig:
    """Return the preset with other keys of `algorithm.teacher`."""
    teacher = replace(BASE.algorithm.teacher, **changes)
    return replace(BASE, algorithm=replace(BASE.algorithm, teacher=teacher))


def specs_of(
    cfg: RunConfig,
    *,
    assignment: GpuAssignment | None = None,
    found: Sequence[Gpu] = (),
    judges: Sequence[int] = (),
) -> list[RoleSpec]:
    used = {*used_gpus(assignment), *judges}
    engines = teacher_engines(cfg, used=used, num_gpus=len(found))
    return make_engine_specs(cfg, RUN_DIR, engines, devices=found)


def test_teacher_with_a_path_is_a_role_of_the_run() -> None:
    (spec,) = specs_of(config_of(serve=["actor.kv_cache_gib=3"]))
    assert spec.name == "teacher"
    assert spec.argv[1:5] == (str(ROOT / "run.py"), "serve", "--config", "quickstart")
    words = spec.argv[5:]
    assert f"model.path={ROOT / 'configs' / 'policies' / 'tiny-expert'}" in words
    assert {"policy.role=teacher", "actor.max_model_len=513"} <= {*words}
    served = load_config("quickstart", [*words])
    assert served.actor.kv_cache_gib == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_teacher_from_the_policys_folder_computes_as_the_policy(dtype: str) -> None:
    own = str(ROOT / "configs/policies/tiny-expert")
    cfg = replace(config_of(path="configs/policies/tiny-expert"), model=ModelSection(path=own))
    (spec,) = specs_of(replace(cfg, model=replace(cfg.model, dtype=dtype)))
    assert load_config("quickstart", [*spec.argv[5:]]).model.dtype == dtype
    (spec,) = specs_of(replace(cfg, model=ModelSection(path="configs/policies/tiny", dtype=dtype)))
    stored = json.loads((ROOT / own / "config.json").read_text(encoding="utf-8"))["dtype"]
    assert load_config("quickstart", [*spec.argv[5:]]).model.dtype == stored


def test_many_tokens_raise_the_limit_of_the_engine() -> None:
    (few,) = specs_of(config_of(form=TeacherForm.TOPK, k=20))
    (many,) = specs_of(config_of(form=TeacherForm.TOPK, k=21))
    assert not any("max_logprobs" in word for word in few.argv)
    words = list(many.argv[5:])
    assert load_config("quickstart", words).actor.engine_args == {"max_logprobs": 21}


def test_teacher_with_an_address_starts_no_role() -> None:
    assert specs_of(config_of(path="", url="http://h/v1", model="m")) == []
    assert specs_of(config_of(path="")) == []


def test_only_learner_and_teacher_receive_the_key(tmp_path: Path) -> None:
    cfg = config_of()
    roles = make_role_specs(cfg.run, RunDir(root=tmp_path), num_actors=1, has_hub=True)
    every = with_engines(roles, specs_of(cfg), RUN_DIR)
    assert [each.name for each in every] == [
        *("teacher", "envhub", "scheduler", "learner", "actor-0")
    ]
    keys = {each.name: each.env.get(KEY_VARIABLE, "") for each in every}
    assert keys["teacher"] == keys["learner"] != ""
    assert {keys[name] for name in ("envhub", "scheduler", "actor-0")} == {""}


def test_teacher_gets_the_first_gpu_that_no_role_uses() -> None:
    (spec,) = specs_of(config_of(), assignment=PLACED, found=GPUS)
    assert spec.env["CUDA_VISIBLE_DEVICES"] == "GPU-2"
    with pytest.raises(ConfigError, match="use all 3 GPUs"):
        specs_of(config_of(), assignment=PLACED, found=GPUS, judges=[2])
    shared = config_of(gpus=[0, 2])
    (spec,) = specs_of(shared, assignment=PLACED, found=GPUS, judges=[2])
    assert spec.env["CUDA_VISIBLE_DEVICES"] == "GPU-0,GPU-2"
    assert "actor.tensor_parallel_size=2" in spec.argv
    with pytest.raises(ConfigError, match=r"gpus=\[3\]: expects numbers of GPUs from 0 to 2"):
        specs_of(config_of(gpus=[3]), assignment=PLACED, found=GPUS)
