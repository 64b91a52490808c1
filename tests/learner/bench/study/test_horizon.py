"""Laws of the study of horizons: equal spending, intervals over seeds, collapse, distance."""

import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from common.store.journal import JournalWriter
from common.wire.messages import EpisodeKind
from learner.bench.study.horizon import (
    budget_of,
    distance_table,
    has_collapsed,
    horizon_table,
    success_at,
    success_svg,
)
from learner.bench.study.intervals import gap, iqm, over_seeds
from learner.bench.study.outcome import Outcome, Point, _by_distance
from tests.learner.builders import make_trajectory


def run(arm: str, seed: int, *curve: float, tokens_per_step: int = 100) -> Outcome:
    """A run evaluated every ten steps; the first success is before training."""
    nan = (float("nan"), float("nan"))
    points = tuple(
        Point(
            step=10 * i,
            success=success,
            num_episodes=40 * i,
            num_tokens=10 * i * tokens_per_step,
            wall_s=5.0 * i,
        )
        for i, success in enumerate(curve)
    )
    return Outcome(
        **{"arm": arm, "seed": seed, "before": curve[0], "after": curve[-1], "after_ci95": nan},
        **{"num_after": 9, "gain": 0.0, "gain_ci95": nan, "trained": 0.0, "num_trained": 1},
        **{"lag_mean": 0.0, "ess_min": 1.0, "points": points},
    )


RUNS = [
    *(run("short", seed, 0.1, 0.4, 0.4 + seed / 50) for seed in range(5)),
    *(
        run("long", seed, 0.1, 0.3, 0.8 - 0.7 * (seed == 4), tokens_per_step=300)
        for seed in range(5)
    ),
]


def test_interquartile_mean_leaves_out_the_lowest_and_highest_quarter() -> None:
    assert iqm(np.array([9.0, 1.0, 2.0, 3.0, -50.0])) == pytest.approx(2.0)
    assert iqm(np.array([0.2])) == pytest.approx(0.2)


def test_interval_over_seeds_holds_the_mean_and_is_none_for_equal_runs() -> None:
    mean, low, high = over_seeds(np.array([[0.1, 0.2, 0.3, 0.4, 0.9], [0.5] * 5]))
    assert mean == pytest.approx([0.3, 0.5])
    assert low[0] < mean[0] < high[0]
    assert (low[1], high[1]) == pytest.approx((0.5, 0.5))


def test_gap_between_two_arms_is_zero_only_where_its_interval_says_so() -> None:
    low, (least, most) = gap([0.5, 0.5, 0.5], [0.4, 0.4, 0.4])
    assert (low, least, most) == pytest.approx((0.1, 0.1, 0.1))
    nothing, (least, most) = gap([0.1, 0.5, 0.9], [0.2, 0.5, 0.8])
    assert nothing == pytest.approx(0.0, abs=1e-9)
    assert least < -0.1 < 0.1 < most


def test_arms_are_compared_where_all_of_them_have_spent_as_much() -> None:
    assert budget_of(RUNS, "tokens") == 2000
    assert budget_of(RUNS, "episodes") == 80
    assert success_at(RUNS[5], "tokens", 2000) == pytest.approx(0.1 + 0.2 * 2 / 3)
    assert success_at(RUNS[5], "seconds", 10.0) == pytest.approx(0.8)


def test_collapsed_runs_are_those_that_end_below_half_of_their_best() -> None:
    assert [has_collapsed(each) for each in RUNS] == [False] * 9 + [True]
    assert not has_collapsed(run("luck", 0, 0.02, 0.06, 0.0))
    text = horizon_table(RUNS)
    assert "1/5" in text.splitlines()[-1]
    assert "at 2,000 tokens" in text


def test_success_by_distance_counts_the_last_evaluation_alone(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path / "journal")
    for number, index, group, is_success in (
        (0, 3, "eval-after-model", True),  # 4 rooms
        (1, 36, "eval-after-model", False),  # 5
        (2, 31, "eval-after-model", True),  # 32
        (3, 0, "eval-before-model", True),
    ):
        made = make_trajectory([5, 6], [0, 1])
        name = {"episode_id": f"{group}/{number}", "item_id": f"Carry@1..32-test-{index}"}
        name["env"] = "rooms"
        told = {"group_id": group, "is_success": is_success, "kind": EpisodeKind.EVAL}
        journal.append(replace(made, **name, **told))
    journal.close()
    made = replace(RUNS[0], by_distance=_by_distance(tmp_path / "journal"))
    row = distance_table([made]).splitlines()[-1]
    assert row == "| short | 1.000 (1) | 0.000 (1) | 0.000 (0) | 1.000 (1) |"


def test_picture_has_a_line_in_a_band_for_every_arm() -> None:
    drawn = ElementTree.fromstring(success_svg(RUNS, "tokens"))
    tags = [each.tag.rpartition("}")[2] for each in drawn]
    assert tags.count("polyline") == tags.count("polygon") == 2
    assert "nan" not in success_svg(RUNS, "seconds")
