"""Laws of a study's outcomes: the files of a run and their evaluation."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.study.outcome import begin, read_outcome
from common.errors import ConfigError
from common.wire.messages import EpisodeKind, Trajectory
from learner.journal.journal import JournalWriter
from tests.learner.builders import make_trajectory


def write_run(folder: Path, report: Mapping[str, object]) -> int:
    """Write a run of two steps; return the sampled tokens of an episode."""
    made = make_trajectory([5, 6, 7, 8], [0, 1, 1, 0])

    def at(version: int, name: str, kind: EpisodeKind = EpisodeKind.TRAIN) -> Trajectory:
        versions = np.where(made.loss_mask, version, -1).astype(np.int32)
        return replace(made, episode_id=name, versions=versions, kind=kind)

    journal = JournalWriter(folder / "journal")
    for trajectory in (
        at(0, "a/0"),
        at(0, "a/0"),  # A repeated episode counts once.
        at(1, "b/0"),
        at(1, "c/0"),
        at(1, "eval-step/0", EpisodeKind.EVAL),
    ):
        journal.append(trajectory)
    journal.close()
    (folder / "report.json").write_text(json.dumps(report), encoding="utf-8")
    (folder / "eval.jsonl").write_text('{"step": 1, "eval/success": 0.5}\n', encoding="utf-8")
    lines = [
        {
            "step": step,
            "time_s": 5.0 * step,
            "train/num_sampled_tokens": num_tokens,
            "offpolicy/lag_mean": lag,
            "offpolicy/ess_frac": ess,
        }
        for step, num_tokens, lag, ess in ((1, 30.0, 0.0, 1.0), (2, 10.0, 2.0, 0.8))
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    return int(made.loss_mask.sum())


def test_outcome_counts_generated_tokens_until_each_evaluation(tmp_path: Path) -> None:
    report = {"before": {"success": 0.25}, "after": {"success": 0.75}}
    sampled = write_run(tmp_path, report)
    outcome = read_outcome(tmp_path, arm="x", seed=3)
    assert [(p.step, p.success, p.num_episodes, p.num_tokens) for p in outcome.points] == [
        (0, 0.25, 0, 0),
        (1, 0.5, 1, sampled),
        (2, 0.75, 3, 3 * sampled),
    ]
    assert [point.spent_s for point in outcome.points] == [0.0, 0.0, 5.0]
    assert outcome.lag_mean == pytest.approx(0.5)  # 30 tokens of lag 0, 10 of lag 2
    assert (outcome.ess_min, outcome.before, outcome.after) == (0.8, 0.25, 0.75)


def test_run_without_first_evaluation_has_no_first_point(tmp_path: Path) -> None:
    write_run(tmp_path, {"before": None, "after": {"success": 0.75}})
    outcome = read_outcome(tmp_path, arm="x", seed=3)
    assert [point.step for point in outcome.points] == [1, 2]
    assert np.isnan(outcome.before)


def test_run_resumes_only_with_original_settings(tmp_path: Path) -> None:
    begin(tmp_path / "a", ["learner.lr=1", "run.seed=0"])
    begin(tmp_path / "a", ["run.seed=0", "learner.lr=1"])
    with pytest.raises(ConfigError, match=r"a was begun with other settings"):
        begin(tmp_path / "a", ["learner.lr=2", "run.seed=0"])
