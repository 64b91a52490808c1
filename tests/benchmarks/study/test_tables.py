"""Laws of the tables of studies: losses of the default, equal arms and plans."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.study.command import plan_text
from benchmarks.study.outcome import SeedResult
from benchmarks.study.plan import Does, LagArm, Study, names, read_study
from benchmarks.study.queue import Queue
from benchmarks.study.tables import (
    TABLES,
    algorithms_table,
    branches_table,
    by_lag_arm,
    context_table,
    losses,
    recipes_table,
    staleness_table,
)
from common.config.evaluation import StudySection
from common.config.load import load_config
from common.repository import ROOT
from tests.benchmarks.study.builders import make_run


def lagged(rate: str, lag: int, kind: str, *after: float) -> list[SeedResult]:
    name = LagArm(rate, lag, kind, True).name
    return [replace(make_run(name, seed, 0.1, each), points=()) for seed, each in enumerate(after)]


LAGGED = [
    each
    for rate in ("1x", "3x")
    for part in (
        lagged(rate, 0, "default", 0.6, 0.6, 0.6),
        lagged(rate, 0, "none", 0.6, 0.6, 0.6),
        lagged(rate, 4, "default", 0.57, 0.57, 0.57),
        lagged(rate, 4, "none", 0.2, 0.2, 0.2),
    )
    for each in part
]


def test_lagged_arm_name_encodes_its_settings() -> None:
    arm = LagArm.of("3x-lag16-per-turn-off")
    assert arm == LagArm("3x", 16, "per-turn", False)
    assert arm.name == "3x-lag16-per-turn-off"


def test_default_is_compared_with_both_baselines() -> None:
    found = losses(by_lag_arm(LAGGED))
    lost, low, high, ahead = found[LagArm("1x", 4, "default", True)]
    assert (lost, low, high) == pytest.approx((0.03, 0.03, 0.03))
    assert ahead == pytest.approx(0.2 - 0.57)
    text = staleness_table(LAGGED)
    assert "| 1x | 4 | on | +3.0 [3.0, 3.0] | 2 | +37.0 |" in text


def test_tables_have_a_row_per_arm_with_seed_intervals() -> None:
    runs = [
        make_run(arm, seed, 0.1, 0.4 + seed / 50) for arm in ("ppo", "rloo") for seed in range(5)
    ]
    row = algorithms_table(runs).splitlines()[2]
    assert row.startswith("| ppo | 5 | 0.100 [0.100, 0.100] | 0.440 [")
    assert recipes_table(runs).splitlines()[3].startswith("| rloo | 5 | 0.440 [")


def test_context_table_pools_all_seeds() -> None:
    runs = [
        replace(make_run("window-1", seed, 0.0, 0.5), num_after=100, cpu_s=12.0) for seed in (0, 1)
    ]
    (row,) = context_table(runs).splitlines()[2:]
    # Wilson: 0 and 100 of 200.
    both = "0.000 [0.000, 0.019] | 0.500 [0.431, 0.569] | 0.500, 0.500"
    assert row == f"| window-1 | {both} | 12 |"
    runs = [replace(each, num_segments=2.0 + each.seed, num_row_tokens=100.0) for each in runs]
    assert branches_table(runs).splitlines()[2:] == [f"| window-1 | {both} | 2.5 | 100 | 12 |"]


def test_plan_counts_remaining_runs_and_cost(tmp_path: Path) -> None:
    study = read_study("staleness")
    text = plan_text(Queue(study=study, folder=tmp_path, section=StudySection()))
    assert "432 runs, of which 60 are the same as others; 0 done, 372 to do" in text
    assert "up to 180 of them fall away" in text


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("study", [read_study(name) for name in names()], ids=names())
def test_every_run_has_a_valid_configuration(study: Study) -> None:
    for one in study.runs()[: len(study.arms)]:
        is_far = (
            "lag" in one.arm.name and "1x-lag4" not in one.arm.name
        )  # others differ in a number
        if one.arm.does is not Does.COMMANDS and not is_far:
            load_config("quickstart", one.overrides, root=ROOT)
        for command in one.arm.commands:
            words = [each.format(run="runs/a", data="runs/b") for each in command[1:]]
            load_config("quickstart", words, root=ROOT)


def test_every_study_has_a_table() -> None:
    assert sorted(TABLES) == sorted(names())
