"""The curriculum of several environments and its counts."""

import json

import pytest

from common.config.groups import GroupsSection
from common.config.horizon import GatedSection, HorizonKind, HorizonOverride, HorizonSection
from common.config.mixture import MixtureKind, MixtureSection
from common.config.run_config import RunConfig
from common.config.tasks import TaskSection
from common.wire.messages import EndReason, EpisodeKind, EpisodeSeen, PolicyKind
from scheduler.curriculum.catalogue import HubCatalogue, SubsetEntry
from scheduler.curriculum.curriculum import Curriculum
from scheduler.curriculum.mixture import Mixture
from scheduler.episodes.table import EpisodeRecord, GroupRecord
from scheduler.state import restore, save
from tests.configs import edited
from tests.scheduler.builders import Table, make_config, seen_of

CATALOGUE = HubCatalogue(
    envs={
        "maze": {"easy": SubsetEntry(num_train=9, num_test=1, max_turns=30)},
        "shop": {
            "long": SubsetEntry(num_train=9, num_test=1, max_turns=30),
            "short": SubsetEntry(num_train=9, num_test=1, max_turns=4),
        },
    }
)
GATED = GatedSection(window_steps=2, min_steps=2, min_truncated_frac=0.5, backoff_steps=1)


def make_curriculum(
    *, mixture: MixtureSection | None = None, subsets: dict[str, HorizonOverride] | None = None
) -> Curriculum:
    """maze is stepwise [10, 20] every 3 steps, shop gated [4, 8]; `subsets` have their own."""
    horizon = HorizonSection(
        kind=HorizonKind.STEPWISE,
        stages=[10, 20],
        every_steps=3,
        gated=GATED,
        per_env={"shop": HorizonOverride(kind="gated", stages=[4, 8]), **(subsets or {})},
    )
    tasks = [
        TaskSection(env=env, subset=subset)
        for env, subset in (("maze", "easy"), ("shop", "long"), ("shop", "short"))
    ]
    cfg = RunConfig(
        tasks=tasks,
        horizon=horizon,
        mixture=mixture or MixtureSection(),
        groups=GroupsSection(size=2, min_size=2),
    )
    chosen = Mixture(cfg.mixture, cfg.tasks, CATALOGUE, seed=0, group_size=2)
    return Curriculum(cfg.horizon, chosen, cfg.tasks, CATALOGUE)


def play(
    curriculum: Curriculum,
    end_reason: EndReason,
    *,
    env: str = "shop",
    subset: str = "long",
    version: int = 0,
    stage: int | None = None,
    num: int = 4,
) -> None:
    """Episodes of a group opened at `version` arrive; `stage`: not the present one."""
    stamp = curriculum.stamp(env, version, subset=subset)
    max_turns = CATALOGUE.entry(env, subset).max_turns
    episode = EpisodeRecord(
        episode_id="g0/0",
        member=0,
        env=env,
        subset=subset,
        item_id=f"{subset}-train-0",
        seed=0,
        horizon=min(stamp.horizon, max_turns),
    )
    group = GroupRecord(
        group_id="g0",
        number=0,
        kind=EpisodeKind.TRAIN,
        policy=PolicyKind.MODEL,
        horizon_stage=stamp.stage if stage is None else stage,
        opened_at_version=version,
        episodes=[episode],
    )
    seen = EpisodeSeen(
        episode_id="g0/0",
        reward=0.0,
        is_success=False,
        end_reason=end_reason,
        num_turns=1,
        wall_s=1.0,
    )
    for _ in range(num):
        curriculum.see(seen, group, episode)


def horizons(curriculum: Curriculum, version: int) -> tuple[int, int]:
    return tuple(curriculum.stamp(env, version).horizon for env in ("maze", "shop"))  # type: ignore[return-value]


def test_every_environment_has_its_own_horizon() -> None:
    curriculum = make_curriculum()
    for version in (1, 2, 3):
        play(curriculum, EndReason.HORIZON, version=0)
        curriculum.step(version, {})
    # shop advanced after two steps in which all were cut, maze after three steps
    assert horizons(curriculum, 3) == (20, 8)
    assert curriculum.report(3)["horizons"]["maze"] == {
        "kind": "stepwise",
        "horizon": 20,
        "stage": 1,
    }
    assert curriculum.report(3)["horizons"]["shop"]["moves"][0]["version"] == 2


def test_subset_with_its_own_horizon_advances_by_its_episodes() -> None:
    """shop/long is gated [5, 9] and inherits that it is; the rest of shop stays where it is."""
    curriculum = make_curriculum(subsets={"shop/long": HorizonOverride(stages=[5, 9])})

    def shop(version: int) -> list[int]:
        stamps = [curriculum.stamp("shop", version, subset=name) for name in ("long", "short")]
        return [stamp.horizon for stamp in stamps]

    assert shop(0) == [5, 4]
    for version in (1, 2):
        play(curriculum, EndReason.HORIZON, subset="long")
        curriculum.step(version, {})
    assert shop(2) == [9, 4]
    report = curriculum.report(2)["horizons"]
    assert {name: each["horizon"] for name, each in report.items()} == {
        "maze": 10,
        "shop": 4,
        "shop/long": 9,
    }
    again = make_curriculum(subsets={"shop/long": HorizonOverride(stages=[5, 9])})
    restore(again, json.loads(json.dumps(save(curriculum))))
    assert again.stamp("shop", 2, subset="long").horizon == 9
    assert save(again) == save(curriculum)


@pytest.mark.parametrize(
    ("end_reason", "subset", "stage"),
    [
        (EndReason.DONE, "long", 0),
        (EndReason.CONTEXT_FULL, "long", 0),
        (EndReason.TRUNCATED, "long", 0),  # A longer horizon has no effect on a truncation.
        (EndReason.HORIZON, "short", 0),  # more turns than 4 the environment does not give
        (EndReason.HORIZON, "long", 1),  # The episode belongs to another stage.
    ],
)
def test_gated_horizon_ignores_other_end_reasons(
    end_reason: EndReason, subset: str, stage: int
) -> None:
    curriculum = make_curriculum()
    for version in range(1, 9):
        play(curriculum, end_reason, subset=subset, stage=stage)
        curriculum.step(version, {})
    assert curriculum.stamp("shop", 8).horizon == 4


def test_groups_of_an_earlier_stage_visit_do_not_count() -> None:
    curriculum = make_curriculum()
    for version in (1, 2):
        play(curriculum, EndReason.HORIZON)
        curriculum.step(version, {})
    play(curriculum, EndReason.DONE, version=2)
    curriculum.step(3, {"ess_frac": 0.1})  # back to stage 0 at version 3
    assert curriculum.stamp("shop", 3).stage == 0
    for version in range(4, 9):
        play(curriculum, EndReason.HORIZON, version=1)  # opened in the first visit
        curriculum.step(version, {})
    assert curriculum.stamp("shop", 8).stage == 0
    for version in (9, 10):
        play(curriculum, EndReason.HORIZON, version=4)
        curriculum.step(version, {})
    assert curriculum.stamp("shop", 10).stage == 1


def test_repeated_step_report_counts_once() -> None:
    once, twice = make_curriculum(), make_curriculum()
    for curriculum, num in ((once, 1), (twice, 2)):
        for _ in range(num):
            curriculum.step(1, {"entropy": 1.0})
    assert save(once) == save(twice)


def test_restored_curriculum_decides_like_the_original() -> None:
    whole, first, second = make_curriculum(), make_curriculum(), make_curriculum()

    def tell(curriculum: Curriculum, version: int) -> None:
        play(curriculum, EndReason.HORIZON, version=version - 1)
        curriculum.step(version, {"entropy": 1.0, "ess_frac": 0.1 if version == 4 else 0.9})

    for version in range(1, 10):
        tell(whole, version)
    for version in range(1, 3):
        tell(first, version)
    play(first, EndReason.HORIZON, version=2)  # half of step 3
    restore(second, json.loads(json.dumps(save(first))))
    second.step(3, {"entropy": 1.0, "ess_frac": 0.9})
    for version in range(4, 10):
        tell(second, version)
    assert save(second) == save(whole)
    assert [m["cause"] for m in whole.report(9)["horizons"]["shop"]["moves"]] == [
        "truncated_and_flat",
        "ess",
        "truncated_and_flat",
    ]


def test_new_stage_resets_known_item_difficulties() -> None:
    mixture = MixtureSection(kind=MixtureKind.ADAPTIVE)
    curriculum = make_curriculum(mixture=mixture)
    play(curriculum, EndReason.DONE, env="maze", subset="easy")
    play(curriculum, EndReason.DONE)
    for version in (1, 2, 3):  # maze changes its stage at 3
        curriculum.step(version, {})
    keys = list(curriculum.mixture.item_success.known)
    assert keys == ["shop/long-train-0"]


def test_new_stage_keeps_difficulties_of_subsets_with_another_schedule() -> None:
    mixture = MixtureSection(kind=MixtureKind.ADAPTIVE)
    subsets = {"shop/short": HorizonOverride(kind="fixed", stages=[4])}
    curriculum = make_curriculum(subsets=subsets, mixture=mixture)
    play(curriculum, EndReason.DONE, env="maze", subset="easy")
    play(curriculum, EndReason.DONE, subset="short")
    for version in (1, 2):  # shop changes its stage at 2, apart from shop/short
        play(curriculum, EndReason.HORIZON)
        curriculum.step(version, {})
    assert curriculum.stamp("shop", 2, subset="long").stage == 1
    keys = list(curriculum.mixture.item_success.known)
    assert keys == ["maze/easy-train-0", "shop/short-train-0"]


def test_open_group_keeps_horizon_across_stages() -> None:
    table = Table(cfg=make_config())  # stages 5, 10, 20 every two steps
    table.hello("actor-0")
    table.hello("learner")
    early = table.ask("actor-0", 4).leases
    for version in (1, 2):
        table.step(version)
    late = [lease for lease in table.ask("actor-0", 16, version=2).leases]
    groups = {lease.group_id: set[tuple[int, int]]() for lease in [*early, *late]}
    for lease in [*early, *late]:
        groups[lease.group_id].add((lease.horizon, lease.horizon_stage))
    assert all(len(stamps) == 1 for stamps in groups.values())
    assert groups[early[0].group_id] == {(5, 0)}
    assert {lease.horizon_stage for lease in late if lease.opened_at_version == 2} == {1}


def test_gated_horizon_advances_and_survives_a_scheduler_restart() -> None:
    cfg = make_config(num_steps=50)
    cfg = edited(
        cfg, {"horizon": HorizonSection(kind=HorizonKind.GATED, stages=[5, 10], gated=GATED)}
    )
    table = Table(cfg=cfg)
    table.hello("actor-0")
    table.hello("learner")
    for version in (1, 2):
        leases = table.ask("actor-0", 8, version=version - 1).leases
        table.report(seen=[seen_of(lease, end_reason=EndReason.HORIZON) for lease in leases])
        table.step(version)
    assert table.core.status()["curriculum"]["horizons"]["maze"]["horizon"] == 10
    restarted = Table(cfg=cfg)
    restarted.core.restore(json.loads(json.dumps(table.core.snapshot())))
    assert restarted.core.status()["stage"] == 1


def test_changed_stages_keep_the_stage_and_open_groups() -> None:
    """At version 3 maze is at its second stage; the gated shop has moved at version 2."""
    curriculum = make_curriculum()
    for version in (1, 2, 3):
        play(curriculum, EndReason.HORIZON, version=0)
        curriculum.step(version, {})
    group = curriculum.make_group(0, version=3, now=0.0)
    changed = HorizonSection(
        kind=HorizonKind.STEPWISE,
        stages=[11, 22],
        every_steps=3,
        gated=GATED,
        per_env={"shop": HorizonOverride(kind="gated", stages=[4, 9])},
    )
    before = group.episodes[0].horizon
    curriculum.configure(changed, RunConfig().curriculum)
    assert group.episodes[0].horizon == before
    assert horizons(curriculum, 3) == (22, 9)
    assert curriculum.gated["shop"].since == 3  # Its window begins anew with the new horizon.
    again = edited(changed, {"every_steps": 9, "per_env": {"shop": HorizonOverride(kind="gated")}})
    curriculum.configure(edited(again, {"stages": [12]}), RunConfig().curriculum)
    assert horizons(curriculum, 3) == (12, 12)  # The gated schedule has no second stage left.


def test_unchanged_schedule_keeps_its_measurements() -> None:
    curriculum = make_curriculum()
    play(curriculum, EndReason.HORIZON)
    curriculum.step(1, {})
    play(curriculum, EndReason.HORIZON)
    saved = save(curriculum)
    curriculum.configure(curriculum._horizon, RunConfig().curriculum)
    assert save(curriculum) == saved
