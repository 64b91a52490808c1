"""Laws of the engines beside the actors: own GPUs, and a place in the memory plan."""

from dataclasses import replace

import pytest

from common.config.actor import SeatsOptions
from common.config.load import load_config
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.host.machine import GIB, Gpu
from common.repository import ROOT
from learner.policy.model_shape import read_shape
from tools.checks.gpu_placement import GpuAssignment, assign_gpus
from tools.checks.memory_plan import make_plan, plan_here, served_parts
from tools.checks.served_engines import served_engines

TINY = "configs/policies/tiny"
EXPERT = "configs/policies/tiny-expert"
PLACED = GpuAssignment(learner=(0,), actors=((1,),))
JUDGE = load_config("judge", [])
TEACHER = load_config("teacher", [])


def with_all(cfg: RunConfig) -> RunConfig:
    """Return a run with a judge, a teacher, one opponent and one engine of past versions."""
    teacher = replace(cfg.algorithm.teacher, path=EXPERT)
    seats = SeatsOptions(opponents=[TINY, "checkpoints"])
    return replace(
        cfg,
        algorithm=replace(cfg.algorithm, teacher=teacher),
        actor=replace(cfg.actor, seats=seats),
    )


def on_gpus(cfg: RunConfig) -> RunConfig:
    return replace(cfg, learner=replace(cfg.learner, device="auto"))


def cards(num: int) -> tuple[Gpu, ...]:
    return tuple(Gpu(uuid=f"{n}", name="", memory_bytes=80 * GIB) for n in range(num))


def served_gib(cfg: RunConfig, role: str, *, num_gpus: int) -> dict[str, float]:
    """Return the memory of an engine beside the actors in GiB, by place."""
    shape = read_shape(ROOT / cfg.model.path)
    places = make_plan(cfg, shape, on=cards(num_gpus), host_bytes=0)
    sizes = {
        place.name: [part.num_bytes for part in place.parts if part.label.startswith(f"{role} ")]
        for place in places
    }
    return {name: round(sum(parts) / GIB, 1) for name, parts in sizes.items()}


def test_each_engine_has_a_gpu_of_its_own() -> None:
    engines = served_engines(with_all(JUDGE), assignment=PLACED, num_gpus=6)
    assert [(each.role, each.gpus) for each in engines] == [
        ("judge-judge", (2,)),
        ("teacher", (3,)),
        ("opponent-0", (4,)),
        ("opponent-past-0", (5,)),
    ]
    with pytest.raises(ConfigError, match="2 engines of opponents need a GPU each, but 1 are"):
        served_engines(with_all(JUDGE), assignment=PLACED, num_gpus=5)


def test_machine_without_gpus_has_all_engines_on_the_host() -> None:
    engines = served_engines(with_all(JUDGE))
    assert [each.gpus for each in engines] == [()] * 4


def test_host_plan_counts_every_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (host,) = plan_here(with_all(JUDGE))
    labels = [part.label for part in host.parts]
    for role in ("judge-judge", "teacher", "opponent-0", "opponent-past-0"):
        parts = [f"{role} weights", f"{role} KV cache", f"{role} programs"]
        assert [label for label in labels if label.startswith(f"{role} ")] == parts
    alone = replace(JUDGE, tasks=load_config("quickstart", []).tasks)
    (without,) = plan_here(alone)
    assert host.total_bytes - without.total_bytes > 4 * 3 * GIB


def test_teacher_on_a_gpu_of_its_own_has_an_entry() -> None:
    alone = {"gpu 0": 0.0, "gpu 1": 0.0, "gpu 2": 68.0, "host": 0.0}  # 0.85 of 80 GiB
    assert served_gib(on_gpus(TEACHER), "teacher", num_gpus=3) == alone
    teacher = replace(TEACHER.algorithm.teacher, gpus=[1])
    shared = replace(TEACHER, algorithm=replace(TEACHER.algorithm, teacher=teacher))
    beside = {"gpu 0": 0.0, "gpu 1": 68.0, "host": 0.0}
    assert served_gib(on_gpus(shared), "teacher", num_gpus=3) == beside


def test_judge_that_shares_a_gpu_counts_there() -> None:
    reward = {**JUDGE.envs.dataset.reward}
    judge = {**reward["judge"], "gpus": [1], "serve": ["actor.gpu_memory_frac=0.25"]}
    dataset = replace(JUDGE.envs.dataset, reward=reward | {"judge": judge})
    cfg = on_gpus(replace(JUDGE, envs=replace(JUDGE.envs, dataset=dataset)))
    beside = {"gpu 0": 0.0, "gpu 1": 20.0, "host": 0.0}
    assert served_gib(cfg, "judge-judge", num_gpus=2) == beside
    assert assign_gpus(cfg, num_gpus=2).learner == (0,)


@pytest.mark.parametrize("gpu", [None, *cards(1)])
def test_setting_that_is_no_number_is_named(gpu: Gpu | None) -> None:
    key = "actor.kv_cache_gib" if gpu is None else "actor.gpu_memory_frac"
    teacher = replace(TEACHER.algorithm.teacher, serve=[f"{key}=much"])
    cfg = replace(TEACHER, algorithm=replace(TEACHER.algorithm, teacher=teacher))
    (engine,) = served_engines(cfg)
    with pytest.raises(ConfigError, match=rf"algorithm\.teacher\.serve=\[{key}=much\]: expects a"):
        served_parts(engine, gpu)
