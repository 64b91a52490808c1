"""Laws of the roles that serve the judges of a run."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from common.config.load import load_config
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.host.machine import Gpu
from common.repository import ROOT
from common.store.run_dir import RunDir
from envhub.envs.dataset.judges.options import KEY_VARIABLE
from tools.checks.gpu_placement import GpuAssignment, used_gpus
from tools.checks.served_engines import judge_engines
from tools.launch.base import RoleSpec
from tools.launch.roles import make_role_specs
from tools.launch.served import make_engine_specs, with_engines

PATH = "configs/policies/tiny-arithmetic"
GPUS = [Gpu(uuid=f"GPU-{n}", name="x", memory_bytes=80 << 30) for n in range(2)]
RUN_DIR = RunDir(root=ROOT / "runs" / "x")


def config_of(*overrides: str) -> RunConfig:
    return load_config("judge", overrides)


def specs_of(
    cfg: RunConfig, *, assignment: GpuAssignment | None = None, found: Sequence[Gpu] = ()
) -> list[RoleSpec]:
    used = used_gpus(assignment)
    engines = judge_engines(cfg, used=used, num_gpus=len(found))
    return make_engine_specs(cfg, RUN_DIR, engines, devices=found)


def test_judge_with_a_path_is_a_role_of_the_run() -> None:
    (spec,) = specs_of(config_of("run.name=x", "reward.judge.serve=[actor.max_model_len=512]"))
    assert spec.name == "judge-judge"
    assert spec.argv[1:5] == (str(ROOT / "run.py"), "serve", "--config", "quickstart")
    words = spec.argv[5:]
    assert f"model.path={ROOT / PATH}" in words
    assert {"run.name=x", "policy.role=judge-judge"} <= {*words}
    assert "actor.max_model_len=512" in words  # The command line refuses a key given twice.
    assert "actor.max_model_len=2048" not in words
    assert spec.log_path.name == "judge-judge.log"
    assert not spec.ends_run


def test_judge_with_an_address_starts_no_role() -> None:
    own = ("reward.judge.path=", "reward.judge.url=http://h/v1", "reward.judge.model=m")
    assert specs_of(config_of(*own)) == []
    assert specs_of(load_config("dataset", [])) == []
    assert specs_of(config_of("tasks=[{env: babyai, subset: GoToLocal}]")) == []


def test_only_hub_and_judges_receive_the_key(tmp_path: Path) -> None:
    cfg = config_of()
    roles = make_role_specs(cfg.run, RunDir(root=tmp_path), num_actors=1, has_hub=True)
    every = with_engines(roles, specs_of(cfg), RUN_DIR)
    assert [each.name for each in every] == [
        "judge-judge",
        "envhub",
        "scheduler",
        "learner",
        "actor-0",
    ]
    keys = {each.name: each.env.get(KEY_VARIABLE) for each in every}
    assert keys["judge-judge"] == keys["envhub"]
    assert keys["envhub"] is not None
    assert len(keys["envhub"]) >= 32
    assert keys["scheduler"] is keys["learner"] is keys["actor-0"] is None
    words = [word for each in every for word in each.argv]
    assert all(keys["envhub"] not in word for word in words)
    assert with_engines(roles, [], RUN_DIR) == roles


def test_engine_of_a_judge_gets_a_free_gpu() -> None:
    assignment = GpuAssignment(learner=(0,), actors=((0,),))
    (spec,) = specs_of(config_of(), assignment=assignment, found=GPUS)
    assert spec.env["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    shared = config_of("reward.judge.gpus=[0]")
    (spec,) = specs_of(shared, assignment=GpuAssignment(learner=(0,), actors=((1,),)), found=GPUS)
    assert spec.env["CUDA_VISIBLE_DEVICES"] == "GPU-0"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], "use all 2 GPUs of this machine"),
        (["reward.judge.gpus=[2]"], "expects numbers of GPUs from 0 to 1"),
        (["reward.judge.gpus=[0]", "reward.judge.serve=fast"], "expects a list such as"),
        (["launcher=ray"], "needs launcher=local. Start the engine with `python run.py serve`"),
    ],
)
def test_engine_that_cannot_start_is_refused(overrides: list[str], words: str) -> None:
    assignment = GpuAssignment(learner=(0,), actors=((1,),))
    with pytest.raises(ConfigError) as caught:
        specs_of(config_of(*overrides), assignment=assignment, found=GPUS)
    assert words in str(caught.value)
    assert str(caught.value).startswith("reward.judge.")
