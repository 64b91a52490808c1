"""Laws of the roles that serve the opponents of a run."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actor.policy import PolicyConfig
from actor.seats.engines import KEY_VARIABLE, RUN_VARIABLE
from common.config.actor import SeatsOptions
from common.config.learner import ShardPlace
from common.config.load import load_config
from common.config.run_config import Launcher, RunConfig
from common.errors import ConfigError
from common.host.machine import Gpu
from common.repository import ROOT
from common.store.run_dir import RunDir
from tests.configs import edited
from tools.checks.gpu_placement import GpuAssignment, used_gpus
from tools.checks.served_engines import opponent_engines
from tools.evaluate.config import EvalConfig
from tools.evaluate.evaluate import serve_opponents
from tools.launch.base import RoleSpec
from tools.launch.roles import make_role_specs
from tools.launch.served import make_engine_specs, with_engines

FOLDER = "configs/policies/tiny"
OTHER = "configs/policies/tiny-expert"
GPUS = [Gpu(uuid=f"GPU-{n}", name="x", memory_bytes=80 << 30) for n in range(4)]
PLACED = GpuAssignment(learner=(0,), actors=((1,),))
BASE = load_config("smoke", [])
RUN_DIR = RunDir(root=ROOT / "runs" / "x")


def config_of(**seats: Any) -> RunConfig:
    return replace(BASE, actor=replace(BASE.actor, seats=SeatsOptions(**seats)))


def specs_of(
    cfg: RunConfig,
    *,
    assignment: GpuAssignment | None = None,
    found: Sequence[Gpu] = (),
    in_training: bool = True,
) -> list[RoleSpec]:
    used = used_gpus(assignment)
    engines = opponent_engines(cfg, used=used, num_gpus=len(found), in_training=in_training)
    return make_engine_specs(cfg, RUN_DIR, engines, devices=found)


def test_model_folder_among_the_opponents_is_a_role() -> None:
    cfg = config_of(opponents=["self", FOLDER, OTHER], eval_opponents=["random", OTHER])
    first, second = specs_of(cfg)
    assert (first.name, second.name) == ("opponent-0", "opponent-1")
    assert first.argv[1:5] == (str(ROOT / "run.py"), "serve", "--config", "quickstart")
    words = [*first.argv[5:]]
    assert {f"model.path={ROOT / FOLDER}", "policy.role=opponent-0"} <= {*words}
    served = load_config("quickstart", words, schema=PolicyConfig)
    assert served.actor.max_model_len == cfg.actor.max_model_len
    assert served.policy.past_every_s == 0.0


def test_opponents_without_a_folder_start_no_role() -> None:
    assert specs_of(BASE) == []
    named = config_of(opponents=["random", "expert", "url"], url="http://h/v1", model="m")
    assert specs_of(named) == []


def test_past_versions_need_whole_checkpoints() -> None:
    cfg = config_of(opponents=["checkpoints"])
    own = replace(cfg.learner, num_nodes=2, num_ranks=2, checkpoint_shards=ShardPlace.OWN_NODE)
    with pytest.raises(ConfigError, match=r"checkpoint_shards=own_node: .*must be whole"):
        specs_of(replace(cfg, learner=own))


def test_evaluation_starts_only_its_own_opponents() -> None:
    cfg = config_of(opponents=[FOLDER, "checkpoints"], eval_opponents=[OTHER])
    (spec,) = specs_of(cfg, in_training=False)
    # The actor numbers all folders of the configuration.
    assert spec.name == "opponent-1"


def test_past_versions_have_engines_of_their_own() -> None:
    cfg = config_of(opponents=["self", "checkpoints"], num_past=2, past_every_s=90.0)
    specs = specs_of(cfg)
    assert [each.name for each in specs] == ["opponent-past-0", "opponent-past-1"]
    served = load_config("quickstart", [*specs[1].argv[5:]], schema=PolicyConfig)
    assert (served.policy.role, served.policy.past_every_s) == ("opponent-past-1", 90.0)
    assert Path(served.model.path) == ROOT / BASE.model.path


def test_only_actors_and_opponents_receive_the_key(tmp_path: Path) -> None:
    cfg = config_of(opponents=[FOLDER])
    run_dir = RunDir(root=tmp_path)
    roles = make_role_specs(cfg.run, run_dir, num_actors=2, has_hub=True)
    every = {each.name: each for each in with_engines(roles, specs_of(cfg), run_dir)}
    assert next(iter(every)) == "opponent-0"
    keys = {name: each.env.get(KEY_VARIABLE) for name, each in every.items()}
    assert keys["opponent-0"] == keys["actor-0"] == keys["actor-1"]
    assert len(keys["actor-0"] or "") >= 32
    assert keys["envhub"] is keys["scheduler"] is keys["learner"] is None
    assert every["actor-1"].env[RUN_VARIABLE] == str(tmp_path)
    assert all((keys["actor-0"] or "") not in w for each in every.values() for w in each.argv)
    assert with_engines(roles, [], run_dir) == roles


def test_engines_of_opponents_get_free_gpus() -> None:
    cfg = config_of(opponents=[FOLDER, "checkpoints"])
    specs = specs_of(cfg, assignment=PLACED, found=GPUS)
    assert [each.env["CUDA_VISIBLE_DEVICES"] for each in specs] == ["GPU-2", "GPU-3"]
    shared = config_of(opponents=[FOLDER], gpus=[1])
    (spec,) = specs_of(shared, assignment=PLACED, found=GPUS)
    assert spec.env["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    with pytest.raises(ConfigError, match=r"2 engines of opponents need a GPU each, but 1 are"):
        specs_of(cfg, assignment=PLACED, found=GPUS[:3])
    with pytest.raises(ConfigError, match="has no GPU 7"):
        specs_of(config_of(opponents=[FOLDER], gpus=[7]), assignment=PLACED, found=GPUS)


def test_engines_of_opponents_need_the_local_launcher() -> None:
    cfg = replace(config_of(opponents=["checkpoints"]), launcher=Launcher.RAY)
    with pytest.raises(ConfigError, match="need launcher=local"):
        specs_of(cfg)


def test_missing_folder_of_an_opponent_is_named(tmp_path: Path) -> None:
    seats = config_of(eval_opponents=["no/such"]).actor.seats
    cfg = edited(EvalConfig(), {"actor.seats": seats})
    with (
        pytest.raises(ConfigError, match=r"seats\.eval_opponents=no/such: no such directory"),
        serve_opponents(cfg, RunDir(root=tmp_path)),
    ):
        pass
