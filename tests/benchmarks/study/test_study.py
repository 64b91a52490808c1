"""Laws of studies: the files of a run and their evaluation."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.study.outcome import Point, SeedResult, read_outcome, success_at
from benchmarks.study.plan import merged
from benchmarks.study.tables import credit_table, curriculum_table
from common.store.journal import JournalWriter
from common.wire.messages import EpisodeKind, Trajectory
from tests.benchmarks.study.builders import make_outcome
from tests.learner.builders import make_trajectory


def evaluated(arm: str, *points: tuple[int, float, int]) -> SeedResult:
    """A run with evaluations (step, success, tokens)."""
    made = tuple(
        Point(step=step, success=success, num_episodes=10 * step, num_tokens=num_tokens)
        for step, success, num_tokens in points
    )
    return make_outcome(arm, points=made)


def test_outcome_counts_generated_tokens_until_each_evaluation(tmp_path: Path) -> None:
    made = make_trajectory([5, 6, 7, 8], [0, 1, 1, 0])
    sampled = int(made.loss_mask.sum())

    def at(version: int, name: str, kind: EpisodeKind = EpisodeKind.TRAIN) -> Trajectory:
        versions = np.where(made.loss_mask, version, -1).astype(np.int32)
        return replace(made, episode_id=name, versions=versions, kind=kind)

    journal = JournalWriter(tmp_path / "journal")
    for trajectory in (
        at(0, "a/0"),
        at(0, "a/0"),  # played again: one play counts
        at(1, "b/0"),
        at(1, "c/0"),
        at(1, "eval-step/0", EpisodeKind.EVAL),
    ):
        journal.append(trajectory)
    journal.close()
    ci = [0.0, 1.0]
    report = {
        "before": {"success": 0.25, "ci95": ci},
        "after": {"success": 0.75, "ci95": ci, "n": 8},
        "gain": {"success": 0.5, "ci95": ci},
    }
    (tmp_path / "report.json").write_text(json.dumps(report), encoding="utf-8")
    (tmp_path / "eval.jsonl").write_text('{"step": 1, "eval/success": 0.5}\n', encoding="utf-8")
    lines = [(1, 30.0, 0.0, 1.0), (2, 10.0, 2.0, 0.8)]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(
            json.dumps(
                {
                    "step": step,
                    "time_s": 5.0 * step,
                    "train/num_sampled_tokens": num_tokens,
                    "offpolicy/lag_mean": lag,
                    "offpolicy/ess_frac": ess,
                    "episodes/arrived": 10.0 * step,
                    "reward/success": 0.5 * step,
                }
            )
            + "\n"
            for step, num_tokens, lag, ess in lines
        ),
        encoding="utf-8",
    )
    outcome = read_outcome(tmp_path, arm="x", seed=3)
    assert [(p.step, p.success, p.num_episodes, p.num_tokens) for p in outcome.points] == [
        (0, 0.25, 0, 0),
        (1, 0.5, 1, sampled),
        (2, 0.75, 3, 3 * sampled),
    ]
    assert outcome.lag_mean == pytest.approx(0.5)  # 30 tokens of lag 0, 10 of lag 2
    assert (outcome.ess_min, outcome.gain) == (0.8, 0.5)
    assert outcome.trained == pytest.approx((10 * 0.5 + 20 * 1.0) / 30)
    assert (outcome.num_trained, outcome.num_after) == (30, 8)
    (tmp_path / "report.json").write_text(
        json.dumps(report | {"before": None, "gain": None}), encoding="utf-8"
    )
    assert [p.step for p in read_outcome(tmp_path, arm="x", seed=3).points] == [1, 2]


def test_credit_study_pools_all_seeds_of_an_arm() -> None:
    rows = credit_table([make_outcome("a"), make_outcome("a")])
    assert "| a | 0.600, 0.600 | 0.600 [0.531, 0.665] | 0.500 [0.465, 0.535] |" in rows


def test_success_at_tokens_is_linear_between_evaluations() -> None:
    outcome = evaluated("x", (0, 0.4, 0), (10, 0.6, 1000), (20, 0.7, 3000))
    assert float(success_at(outcome, "tokens", 500)) == pytest.approx(0.5)
    assert float(success_at(outcome, "tokens", 2000)) == pytest.approx(0.65)


def test_equal_tokens_are_those_of_the_smallest_run() -> None:
    short = evaluated("short", (0, 0.4, 0), (10, 0.5, 1000))
    long = evaluated("long", (0, 0.4, 0), (10, 0.8, 4000))
    table = curriculum_table([short, long])
    assert "at 1,000 tokens" in table
    assert table.splitlines()[3].split(" | ")[-1] == "0.500 |"  # 0.4 + 0.4 / 4


def test_arm_override_replaces_the_studys() -> None:
    assert merged(("a.b=1", "c=2"), ("a.b=[3,4]",)) == ["a.b=[3,4]", "c=2"]
