"""Laws of the comparison with a peer: both clocks, and the time to a given success."""

import math

import pytest

from benchmarks.study.peer import SETUPS, Course, Side, StepClocks, comparison, spent_to, steps_of


def course(*success: float, seed: int = 0, cpu_s: float = 2.0) -> Course:
    """Return a course of 20 steps, with a policy every five steps."""
    steps = [StepClocks(step=n, wall_s=1.0 * n, cpu_s=cpu_s * n) for n in range(1, 21)]
    kept = {5 * (i + 1): v for i, v in enumerate(success)}
    return Course(seed=seed, steps=steps, success=kept)


def side(*courses: Course) -> Side:
    return Side(name="a", courses=list(courses))


def test_success_time_is_interpolated_between_policies() -> None:
    assert spent_to(0.7, course(0.4, 0.6, 0.8).curve()) == pytest.approx((12.5, 25.0))
    assert spent_to(0.7, course(0.4, 0.6).curve()) == (math.inf, math.inf)
    assert spent_to(0.4, course(0.0, 0.8).curve()) == pytest.approx((7.5, 15.0))
    assert spent_to(0.4, course(0.8).curve()) == pytest.approx((5.0, 10.0))


def test_success_time_uses_mean_over_seeds() -> None:
    both = side(course(0.4, 0.6, 0.8), course(0.2, 0.4, seed=1, cpu_s=4.0))
    assert both.curve() == [pytest.approx((5, 15, 0.3)), pytest.approx((10, 30, 0.5))]
    assert spent_to(0.4, both.curve()) == pytest.approx((7.5, 22.5))
    assert spent_to(0.7, both.curve()) == (math.inf, math.inf)


def test_bar_of_a_pretrained_model_is_the_peers_last_success() -> None:
    theirs = side(course(0.4, 0.6), course(0.2, 0.8, seed=1))
    assert SETUPS["peer-pretrained"].bar_of(theirs) == pytest.approx(0.7)
    assert SETUPS["peer"].bar_of(theirs) == 0.687


def test_step_cost_is_mean_over_seeds() -> None:
    both = side(course(), course(seed=1, cpu_s=4.0))
    assert both.per_step() == pytest.approx((1.0, 3.0))


def test_first_step_counts_like_the_rest_without_foreign_load() -> None:
    lines = [
        {
            "step": n,
            "time_s": 100.0 + 3 * n,
            "cpu/learner_s": 50.0 + 2 * n,
            "cpu/engine_s": 7.0 + n,
            "cpu/others_s": 900.0 * n,
            "cpu/cores": 2.0,
        }
        for n in (1, 2, 3)
    ]
    steps = steps_of(lines)
    assert [each.wall_s for each in steps] == pytest.approx([3.0, 6.0, 9.0])
    assert [each.cpu_s for each in steps] == pytest.approx([3.0, 6.0, 9.0])


def test_table_has_rows_per_side_and_seed() -> None:
    sides = [side(course(0.5, 0.874), course(0.7, 0.874, seed=1))]
    rows = comparison(SETUPS["peer"], sides).splitlines()
    assert rows[2] == "| a, mean | 1.0 s | 2.0 s | 0.600 at 5, 0.874 at 10 | 13 |"
    assert rows[3:] == [
        "| seed 0 |  |  | 0.500 at 5, 0.874 at 10 | 15 |",
        "| seed 1 |  |  | 0.700 at 5, 0.874 at 10 | 10 |",
    ]
