"""Laws of a study's table: equal spending, intervals over seeds, gaps to the base arm."""

import io
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.study.command import add_losses
from benchmarks.study.intervals import gap, iqm, over_runs
from benchmarks.study.outcome import SeedResult, budget_of, success_at
from benchmarks.study.plan import read_study
from benchmarks.study.tables import study_table
from benchmarks.suite import Suite
from tests.benchmarks.study.builders import RUNS, make_run


def test_interquartile_mean_drops_the_outer_quarters() -> None:
    assert iqm(np.array([9.0, 1.0, 2.0, 3.0, -50.0])) == pytest.approx(2.0)
    assert iqm(np.array([0.2])) == pytest.approx(0.2)


def test_interval_over_seeds_contains_the_mean() -> None:
    mean, (low, high) = over_runs([0.1, 0.2, 0.3, 0.4, 0.9])
    assert mean == pytest.approx(0.3)
    assert low < mean < high
    assert over_runs([0.5]) == (0.5, (0.5, 0.5))


def test_gap_is_zero_only_within_its_interval() -> None:
    value, ends = gap([0.5, 0.5, 0.5], [0.4, 0.4, 0.4])
    assert (value, *ends) == pytest.approx((0.1, 0.1, 0.1))
    nothing, (least, most) = gap([0.1, 0.5, 0.9], [0.2, 0.5, 0.8])
    assert nothing == pytest.approx(0.0, abs=1e-9)
    assert least < -0.1 < 0.1 < most


def test_arms_are_compared_at_equal_spending() -> None:
    assert budget_of(RUNS, "tokens") == 2000
    assert budget_of(RUNS, "episodes") == 80
    assert success_at(RUNS[5], "tokens", 2000) == pytest.approx(0.1 + 0.2 * 2 / 3)
    assert success_at(RUNS[5], "seconds", 10.0) == pytest.approx(0.8)


def test_table_has_a_row_per_arm_with_its_gap() -> None:
    runs = [make_run(arm, 0, 0.1, after) for arm, after in (("a", 0.4), ("b", 0.5))]
    head, _, first, second = study_table(runs, base="a").splitlines()
    assert "at 1,000 tokens [95 %]" in head
    assert "less a, points [95 %]" in head
    assert first.startswith("| a | 1 | 0.100 [0.100, 0.100] |")
    assert "| 0.500 [0.500, 0.500] | +10.0 [10.0, 10.0] | 0.500 | 1.0 | 0.90 | 12 |" in second


def test_table_without_first_evaluation_has_no_such_column() -> None:
    run = replace(make_run("a", 0, 0.4), before=float("nan"))
    head = study_table([run], base="a").splitlines()[0]
    assert "before" not in head
    assert "episodes" not in head


@pytest.mark.parametrize(("after", "is_kept"), [(0.59, True), (0.57, False)])
def test_lagged_arm_may_lose_two_points(after: float, is_kept: bool) -> None:
    def runs(arm: str, success: float) -> list[SeedResult]:
        return [make_run(arm, seed, 0.1, success) for seed in range(3)]

    suite = Suite(out=io.StringIO())
    add_losses(suite, read_study("staleness"), [*runs("lag0", 0.6), *runs("lag4", after)])
    assert [(row.name, row.kept) for row in suite.rows] == [("lag4 loses against lag0", is_kept)]
    assert suite.rows[0].value == pytest.approx(100 * (0.6 - after))
