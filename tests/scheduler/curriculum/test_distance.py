"""Distances of goals and horizons in any unit: stamped at issue, the same after a restart."""

import json
from dataclasses import replace
from itertools import product

import pytest

from common.config.actor import ActorSection
from common.config.curriculum import (
    CurriculumKind,
    CurriculumSection,
    DistanceGatedSection,
    DistanceSection,
)
from common.config.horizon import HorizonKind, HorizonSection, HorizonUnit
from common.config.mixture import MixtureKind, MixtureSection
from common.config.run_config import RunConfig
from common.config.tasks import TaskSection
from common.config.train import TrainMode
from common.errors import ConfigError
from common.ids import distance_of
from common.wire.messages import EndReason, EpisodeSeen, Lease
from scheduler.components import build_components
from scheduler.core import SchedulerCore
from scheduler.curriculum.catalogue import HubCatalogue, SubsetEntry, validate_tasks
from tests.scheduler.builders import Clock, done_of, hello_of, make_config, request_of
from tools.simulator.workload import catalogue_of

KINDS, UNITS = tuple(CurriculumKind), tuple(HorizonUnit)
HORIZON = [20, 40, 60]
DISTANCE = [4, 8]


def config(
    kind: CurriculumKind,
    *,
    unit: HorizonUnit = HorizonUnit.TURNS,
    mode: TrainMode = TrainMode.ASYNC,
    how: HorizonKind = HorizonKind.STEPWISE,
    mixture: MixtureKind = MixtureKind.WEIGHTS,
) -> RunConfig:
    """One task at 3 to 8 turns and one at any; both curricula move at every second step."""
    has_distance = kind is not CurriculumKind.HORIZON
    distance = DistanceSection(
        kind=how,
        stages=DISTANCE,
        every_steps=2,
        over_steps=4,
        gated=DistanceGatedSection(window_steps=2, min_steps=2, backoff_steps=1),
    )
    section = CurriculumSection(kind=kind, distance=distance if has_distance else DistanceSection())
    return replace(
        make_config(mode=mode, num_steps=50),
        tasks=[
            TaskSection(env="maze", subset="easy", distance=[3, 8]),
            TaskSection(env="shop", subset="any"),
        ],
        horizon=HorizonSection(kind=HorizonKind.STEPWISE, unit=unit, stages=HORIZON, every_steps=2),
        curriculum=section,
        mixture=MixtureSection(kind=mixture),
        actor=ActorSection(max_turn_tokens=4),
    )


def core_of(cfg: RunConfig) -> SchedulerCore:
    core = SchedulerCore(build_components(cfg, catalogue_of(cfg)), clock=Clock())
    core.handle("actor-0", hello_of("actor-0"))
    core.handle("learner", hello_of("learner"))
    return core


def restarted(cfg: RunConfig, core: SchedulerCore) -> SchedulerCore:
    """The scheduler that takes up what another one saved."""
    after = SchedulerCore(build_components(cfg, catalogue_of(cfg)), clock=Clock())
    after.restore(json.loads(json.dumps(core.snapshot())))
    return after


def ask(core: SchedulerCore, num: int = 8) -> list[Lease]:
    return core.handle("actor-0", request_of("actor-0", num, version=core.version)).leases


def stamp(lease: Lease) -> tuple[object, ...]:
    return (lease.item_id, lease.horizon, lease.horizon_unit, lease.max_turns, lease.distance)


def stamps(lease: Lease) -> tuple[int, int]:
    return lease.horizon_stage, lease.distance_stage


@pytest.mark.parametrize(
    ("kind", "unit", "mode"), list(product(KINDS, UNITS, TrainMode)), ids=lambda each: each.value
)
def test_open_group_keeps_item_and_stamp_while_curricula_move(
    kind: CurriculumKind, unit: HorizonUnit, mode: TrainMode
) -> None:
    cfg = config(kind, unit=unit, mode=mode)
    core = core_of(cfg)
    (first,) = ask(core, 1)
    core = restarted(cfg, core)
    core.handle("actor-0", hello_of("actor-0"))
    for version in range(1, 6):
        core.handle("learner", done_of(version))
    others = [lease for lease in ask(core) if lease.group_id == first.group_id]
    assert len(others) == 3
    assert {(stamp(each), stamps(each)) for each in others} == {(stamp(first), stamps(first))}
    is_still = kind is CurriculumKind.DISTANCE
    assert first.horizon == (HORIZON[-1] if is_still else HORIZON[0])
    assert first.horizon_unit is unit
    assert bool(first.max_turns) is (unit is not HorizonUnit.TURNS)
    new = core.parts.curriculum.make_group(99, version=core.version, now=0.0)
    assert new.episodes[0].horizon == HORIZON[-1]
    assert new.horizon_stage == 2
    assert new.distance_stage == (kind is not CurriculumKind.HORIZON and new.distance > 0)


@pytest.mark.parametrize(
    ("kind", "how", "mixture"),
    list(product(KINDS, HorizonKind, [MixtureKind.WEIGHTS, MixtureKind.ADAPTIVE])),
    ids=lambda each: each.value,
)
def test_restarted_scheduler_draws_the_same_items_and_distances(
    kind: CurriculumKind, how: HorizonKind, mixture: MixtureKind
) -> None:
    cfg = config(kind, how=how, mixture=mixture)

    def play(*, restart_at: int) -> list[object]:
        core, made_of = core_of(cfg), []
        for version in range(1, 9):
            if version == restart_at:
                core = restarted(cfg, core)
                core.handle("actor-0", hello_of("actor-0"))
            for number in range(4 * version, 4 * version + 4):
                made = core.parts.curriculum.make_group(number, version=version - 1, now=0.0)
                made_of.append((made.episodes[0].item_id, made.distance, made.distance_stage))
                for episode in made.episodes:
                    core.parts.curriculum.see(seen(episode.episode_id), made, episode)
            core.parts.curriculum.step(version, {"entropy": 1.0, "ess_frac": 0.9})
        return [*made_of, core.parts.curriculum.report(8)["distances"]]

    expected = play(restart_at=0)
    assert all(play(restart_at=at) == expected for at in (2, 5, 8))
    far = [entry for entry in expected[:-1] if isinstance(entry, tuple) and entry[1]]
    bounds = [int(entry[1]) for entry in far]
    assert all(f"@3..{bound}-train-" in entry[0] for entry, bound in zip(far, bounds, strict=True))
    if kind is CurriculumKind.HORIZON or how is HorizonKind.FIXED:
        assert set(bounds) == {8}
    else:
        assert bounds[0] == 4
        assert bounds[-1] == 8
        assert bounds == sorted(bounds)


def seen(episode_id: str, *, is_success: bool = True) -> EpisodeSeen:
    return EpisodeSeen(
        episode_id=episode_id,
        reward=float(is_success),
        is_success=is_success,
        end_reason=EndReason.DONE,
        num_turns=3,
        wall_s=1.0,
    )


def test_gated_distance_backs_off_on_entropy_collapse() -> None:
    curriculum = core_of(config(CurriculumKind.DISTANCE, how=HorizonKind.GATED)).parts.curriculum
    number = iter(range(1000))

    def step(version: int, *, is_solved: bool, entropy: float = 1.0, opened_at: int = -1) -> int:
        for _ in range(6):
            at = version - 1 if opened_at < 0 else opened_at
            group = curriculum.make_group(next(number), version=at, now=0.0)
            for episode in group.episodes:
                told = seen(episode.episode_id, is_success=is_solved)
                curriculum.see(told, group, episode)
        curriculum.step(version, {"entropy": entropy, "ess_frac": 0.9})
        return curriculum.report(version)["distances"]["maze"]["stage"]

    assert [step(v, is_solved=False) for v in (1, 2, 3)] == [0, 0, 0]
    assert [step(v, is_solved=True) for v in (4, 5)] == [0, 1]
    assert curriculum.report(5)["distances"]["maze"]["moves"][-1]["cause"] == "solved"
    assert step(6, is_solved=True) == 1
    assert step(7, is_solved=True, entropy=0.01) == 0
    assert step(8, is_solved=True, opened_at=0) == 0  # It belongs to the previous visit.
    assert step(9, is_solved=True, opened_at=0) == 0


def test_held_out_items_cover_the_whole_range_at_every_stage() -> None:
    cfg = config(CurriculumKind.BOTH)
    cfg = replace(cfg, eval=replace(cfg.eval, before=True, baselines=False, num_items=6))
    core = core_of(cfg)
    items = {lease.item_id: lease for lease in ask(core, 20)}
    far = [item_id for item_id in items if "@" in item_id]
    assert len(far) == 3
    assert all(item_id.startswith("easy@3..8-test-") for item_id in far)
    assert all(lease.horizon_unit is HorizonUnit.TURNS for lease in items.values())


def test_range_without_items_is_refused_with_existing_lengths() -> None:
    task = TaskSection(env="maze", subset="easy", distance=[40, 50])
    entry = SubsetEntry(num_train=9, num_test=1, max_turns=30)
    catalogue = HubCatalogue(
        envs={"maze": {"easy": entry, "easy@40..50": replace(entry, num_train=0)}},
        distances={"maze": {"easy": {"train": {2: 5, 7: 4}, "test": {2: 1}}}},
    )
    with pytest.raises(ConfigError, match=r"tasks\[0\].distance=\[40, 50\]: .* 2 \(5\), 7 \(4\)"):
        validate_tasks([task], catalogue)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tasks": [TaskSection(env="m", subset="s")]}, "curriculum.kind='both': needs a task"),
        (
            {"tasks": [TaskSection(env="m", subset="s", distance=[9, 20])]},
            r"curriculum.distance.stages=\[4, 8\]: the first stage must be at least 9",
        ),
        ({"curriculum": CurriculumSection(distance=DistanceSection(stages=[4, 8]))}, "curriculum"),
        (
            {"horizon": HorizonSection(unit=HorizonUnit.TOKENS, stages=[3])},
            r"horizon.stages=\[3\]: with horizon.unit=tokens, each must be",
        ),
        (
            {"horizon": HorizonSection(unit=HorizonUnit.SECONDS, stages=[1600])},
            r"horizon.stages=\[1600\]: with horizon.unit=seconds, each must be at most .* = 1500",
        ),
    ],
)
def test_curriculum_that_would_do_nothing_is_refused(change: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        replace(config(CurriculumKind.BOTH), **change)


def test_tasks_of_a_subset_need_disjoint_distances() -> None:
    near, far = (TaskSection(env="m", subset="s", distance=each) for each in ([1, 4], [5, 9]))
    assert run_of(near, far).tasks == [near, far]
    with pytest.raises(ConfigError, match="is listed twice"):
        run_of(near, replace(far, distance=[4, 9]))


def run_of(*tasks: TaskSection) -> RunConfig:
    return replace(make_config(), tasks=list(tasks))


def test_item_name_includes_its_distance() -> None:
    assert distance_of(TaskSection(env="m", subset="s", distance=[4, 9]).items(6)) == ("s", 4, 6)
    assert distance_of("s") is None
