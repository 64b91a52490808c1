"""Laws of the study of horizons: equal spending, intervals over seeds, collapse, distance."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.study.intervals import gap, iqm, over_seeds
from benchmarks.study.outcome import SeedResult, budget_of, by_distance, success_at
from benchmarks.study.tables import distance_tables, has_collapsed, horizon_table
from tests.benchmarks.study.builders import RUNS, make_run
from tests.learner.builders import make_trajectory


def test_interquartile_mean_drops_the_outer_quarters() -> None:
    assert iqm(np.array([9.0, 1.0, 2.0, 3.0, -50.0])) == pytest.approx(2.0)
    assert iqm(np.array([0.2])) == pytest.approx(0.2)


def test_interval_over_seeds_contains_the_mean() -> None:
    mean, low, high = over_seeds(np.array([[0.1, 0.2, 0.3, 0.4, 0.9], [0.5] * 5]))
    assert mean == pytest.approx([0.3, 0.5])
    assert low[0] < mean[0] < high[0]
    assert (low[1], high[1]) == pytest.approx((0.5, 0.5))


def test_gap_is_zero_only_within_its_interval() -> None:
    low, (least, most) = gap([0.5, 0.5, 0.5], [0.4, 0.4, 0.4])
    assert (low, least, most) == pytest.approx((0.1, 0.1, 0.1))
    nothing, (least, most) = gap([0.1, 0.5, 0.9], [0.2, 0.5, 0.8])
    assert nothing == pytest.approx(0.0, abs=1e-9)
    assert least < -0.1 < 0.1 < most


def test_arms_are_compared_at_equal_spending() -> None:
    assert budget_of(RUNS, "tokens") == 2000
    assert budget_of(RUNS, "episodes") == 80
    assert success_at(RUNS[5], "tokens", 2000) == pytest.approx(0.1 + 0.2 * 2 / 3)
    assert success_at(RUNS[5], "seconds", 10.0) == pytest.approx(0.8)


def test_collapsed_runs_end_below_half_of_their_best() -> None:
    assert [has_collapsed(each) for each in RUNS] == [False] * 9 + [True]
    assert not has_collapsed(make_run("luck", 0, 0.02, 0.06, 0.0))
    text = horizon_table(RUNS).partition("\n\n")[0]
    assert "1/5" in text.splitlines()[-1]
    assert "at 2,000 tokens" in text


def test_success_by_distance_counts_room_items_by_turns() -> None:
    made = make_trajectory([5, 6], [0, 1])
    told = ((0, True), (4, False), (3, True), (7, True), (2, False))  # 4, 3, 32, 31, 16 turns
    played = [
        replace(made, env="rooms", item_id=f"Carry@1..32-test-{index}", is_success=is_success)
        for index, is_success in told
    ]
    assert by_distance(played) == ((2, 1), (0, 0), (1, 0), (2, 2))
    assert by_distance([made]) == ()


def test_significant_difference_at_distance_is_marked() -> None:
    def shifted(seed: int, solved: int) -> SeedResult:
        plain = make_run("fixed-short", seed, 0.1, 0.2)
        points = [
            replace(each, by_distance=((4, solved * (each.step == 10)), *each.by_distance[1:]))
            for each in plain.points
        ]
        return replace(plain, points=tuple(points))

    base = [make_run("fixed-long", seed, 0.1, 0.2) for seed in range(5)]
    first, *others = distance_tables([*(shifted(s, 4) for s in range(5)), *base]).split("\n\n\n")
    assert "1 to 4 turns" in first
    assert "| fixed-short | 0.000 [0.000, 0.000] | **1.000 [1.000, 1.000]** |" in first
    assert "| fixed-long | 0.000 [0.000, 0.000] | 0.250 [0.250, 0.250] |" in first
    assert "**" not in "".join(others)
