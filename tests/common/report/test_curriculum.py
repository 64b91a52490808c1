"""Laws of the curriculum's card."""

import re
from dataclasses import replace

from common.report.charts import line_chart
from common.report.curriculum import (
    MAX_RULES,
    changes_of,
    changes_shown,
    curriculum_charts,
    level_of_stages,
    smooth,
)
from common.report.machine_cards import curriculum_card
from common.report.model import CurvePoint, Score
from common.report.outcome_cards import eval_curve_card
from common.store.metrics import MetricsLine
from tests.common.report.builders import make_report


def make_lines(num_steps: int, **horizons: list[int]) -> list[MetricsLine]:
    """Step i has success i / num_steps and the i-th horizon of every environment."""
    return [
        {
            "step": step,
            "reward/success": step / num_steps,
            "episodes/truncated_frac": 1 - step / num_steps,
            "horizon/value": max(turns[step - 1] for turns in horizons.values()),
            **{f"horizon/value/{env}": turns[step - 1] for env, turns in horizons.items()},
        }
        for step in range(1, num_steps + 1)
    ]


def rules_of(svg: str) -> list[float]:
    return [float(x) for x in re.findall(r'<line class="rule" x1="([^"]+)"', svg)]


def test_changes_are_the_steps_with_another_value_than_before() -> None:
    assert changes_of([(1, 5), (2, 5), (3, None), (4, 10), (5, 5), (6, 5)]) == [4, 5]
    assert changes_of([]) == []


def test_smooth_is_the_mean_of_what_there_is() -> None:
    points = [(1.0, 1.0), (2.0, 3.0), (3.0, None), (4.0, 5.0)]
    assert smooth(points, 2) == [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0), (4.0, 5.0)]
    assert smooth([(1.0, None)], 2) == [(1.0, None)]


def test_card_marks_the_same_steps_in_both_charts() -> None:
    lines = make_lines(6, maze=[5, 5, 10, 10, 10, 10], shop=[4, 4, 4, 4, 8, 8])
    (upper, above), (lower, below) = curriculum_charts(lines)
    # the axis is 416 wide from 50 on, six steps long: steps 3 and 5
    assert rules_of(upper) == rules_of(lower) == [258.0, 396.7]
    assert [name for name, _ in above] == ["solved", "cut by the horizon"]
    assert below == [("turns, maze", "c4"), ("turns, shop", "c5")]
    assert len(re.findall(r'<path class="line c[13]"', upper)) == 2
    assert len(re.findall(r'<path class="line c[45]"', lower)) == 2


def test_card_has_no_rules_where_the_horizon_always_changes() -> None:
    num_steps = MAX_RULES + 2
    lines = make_lines(num_steps, maze=list(range(1, num_steps + 1)))
    assert [rules_of(svg) for svg, _ in curriculum_charts(lines)] == [[], []]


def test_upright_lines_are_explained_only_where_there_are_some() -> None:
    still = make_lines(6, maze=[5] * 6)
    moving = make_lines(6, maze=[5, 5, 10, 10, 10, 10])
    assert (changes_shown(still), changes_shown(moving)) == ([], [3])
    assert "Upright lines" not in curriculum_card(still)
    assert "Upright lines" in curriculum_card(moving)


def test_card_shows_the_longest_horizon_of_runs_that_name_no_environment() -> None:
    lines: list[MetricsLine] = [{"step": 1, "horizon/value": 5}, {"step": 2, "horizon/value": 9}]
    ((lower, below),) = curriculum_charts(lines)
    assert below == [("turns, longest", "c4")]
    assert len(rules_of(lower)) == 1
    assert curriculum_charts([{"step": 1}]) == []


def test_charts_below_each_other_share_the_axis_when_told() -> None:
    assert ">200<" in line_chart("t", [], x_max=200.0)


def test_a_batch_of_short_tasks_does_not_look_like_a_shorter_horizon() -> None:
    horizons = [(1.0, 6.0), (2.0, 4.0), (3.0, 10.0), (4.0, 8.0), (5.0, 6.0)]
    stages = [(1.0, 0.0), (2.0, 0.0), (3.0, 1.0), (4.0, 1.0), (5.0, 0.0)]
    levels = [y for _, y in level_of_stages(horizons, stages)]
    assert levels == [6.0, 6.0, 10.0, 10.0, 6.0]
    assert level_of_stages(horizons, []) == horizons


def test_curve_of_held_out_success_runs_from_before_training_to_after_it() -> None:
    def interval(success: float) -> tuple[float, float]:
        return success - 0.1, success + 0.1

    def evaluation(success: float) -> Score:
        return Score(success=success, n=10, ci95=interval(success), by_subset={})

    ends = make_report(before=evaluation(0.2), after=evaluation(0.8), steps=30)
    assert eval_curve_card(ends) == ""
    point = CurvePoint(
        step=10,
        num=10,
        num_failed=0,
        success=0.5,
        ci95=interval(0.5),
        score=0.5,
        first_version=10,
        last_version=11,
        own_version_frac=0.9,
        mixed_frac=0.1,
    )
    card = eval_curve_card(replace(ends, eval_curve=[point]))
    labels = re.findall(r"<title>([^<]*)</title>", card)
    order = [
        next(i for i, t in enumerate(labels) if n in t) for n in ("before", "step 10", "after")
    ]
    assert order == sorted(order)
    (line,) = re.findall(r'<path class="line c4" d="M([^"]+)"', card)
    assert len(line.split("L")) == 3
