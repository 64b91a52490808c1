"""Laws of the comparison with a peer: both clocks, and when success was there."""

import math

import pytest

from learner.bench.study.peer import Side, Step, comparison, steps_of


def side(*success: float, cpu_s: float = 2.0) -> Side:
    """A side of 20 steps, horizon 6 and then 10; policies kept every five steps."""
    steps = [
        Step(step=n, wall_s=1.0 * n, cpu_s=cpu_s * n, horizon=6 if n <= 10 else 10)
        for n in range(1, 21)
    ]
    return Side(name="a", steps=steps, success={5 * (i + 1): v for i, v in enumerate(success)})


def test_seconds_of_a_step_are_those_between_two_of_the_same_horizon() -> None:
    assert side().per_step(6) == pytest.approx((1.0, 2.0))
    assert math.isnan(side().per_step(16)[0])


def test_success_is_reached_between_two_policies_that_were_kept() -> None:
    assert side(0.4, 0.6, 0.8).cpu_s_to(0.7) == pytest.approx(25.0)
    assert math.isinf(side(0.4, 0.6).cpu_s_to(0.7))


def test_first_step_of_a_run_counts_as_long_as_the_others_and_foreign_load_does_not() -> None:
    lines = [
        {
            "step": n,
            "time_s": 100.0 + 3 * n,
            "cpu/learner_s": 50.0 + 2 * n,
            "cpu/engine_s": 7.0 + n,
            "cpu/others_s": 900.0 * n,
            "cpu/cores": 2.0,
            "horizon/stage": 1.0,
        }
        for n in (1, 2, 3)
    ]
    steps = steps_of(lines, (6, 10))
    assert [each.wall_s for each in steps] == pytest.approx([3.0, 6.0, 9.0])
    assert [each.cpu_s for each in steps] == pytest.approx([3.0, 6.0, 9.0])
    assert {each.horizon for each in steps} == {10}


def test_table_has_a_row_for_each_side_with_both_clocks() -> None:
    rows = comparison([side(0.4, 0.6), side(0.5)], horizons=(6, 10, 16)).splitlines()
    assert rows[2] == "| a | 1.0 / 1.0 / - s | 2.0 / 2.0 / - | 0.400 at 5, 0.600 at 10 |"
    assert len(rows) == 4
