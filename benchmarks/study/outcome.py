"""The outcome of one run of a study, read from its directory."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.real_run import read_lines
from common.cpu import cpu_seconds
from common.errors import ConfigError
from common.store.run_dir import RunDir, write_atomically
from common.wire.messages import EpisodeKind
from learner.journal.journal import read_journal

NAN = float("nan")
AXES = {"episodes": "num_episodes", "tokens": "num_tokens", "seconds": "spent_s"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A held-out evaluation during training, and the spending so far."""

    step: int
    success: float
    num_episodes: int
    num_tokens: int  # Sampled tokens.
    spent_s: float  # Seconds since the end of the first step, with concurrent evaluations.


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedResult:
    """The figures of one finished run of a study."""

    arm: str
    seed: int
    before: float  # NaN if the initial policy was not evaluated.
    after: float
    lag_mean: float  # In steps, mean over the trained tokens.
    ess_min: float  # Minimum effective sample size of a step, as a fraction of its tokens.
    points: tuple[Point, ...]  # The last is the evaluation at the end.
    cpu_s: float  # Processor seconds of all its processes; 0: not measured.


def success_at(outcome: SeedResult, axis: str, at: float) -> float:
    """Return the success at a given spending, interpolated linearly between two evaluations."""
    spent = [float(getattr(point, AXES[axis])) for point in outcome.points]
    return float(np.interp(at, spent, [point.success for point in outcome.points]))


def budget_of(outcomes: Sequence[SeedResult], axis: str) -> float:
    """Return the spending that every run has reached: the minimum of their totals."""
    return min(float(getattr(each.points[-1], AXES[axis])) for each in outcomes)


def read_outcome(run: Path, *, arm: str, seed: int) -> SeedResult:
    """Return the outcome of a finished run."""
    report = json.loads((run / "report.json").read_text(encoding="utf-8"))
    steps = [line for line in read_lines(run / "metrics.jsonl") if line["step"]]
    num_tokens = [line["train/num_sampled_tokens"] for line in steps]
    lags = [line["offpolicy/lag_mean"] for line in steps]
    return SeedResult(
        arm=arm,
        seed=seed,
        before=report["before"]["success"] if report["before"] else NAN,
        after=report["after"]["success"],
        lag_mean=float(np.average(lags, weights=num_tokens)),
        ess_min=min(line["offpolicy/ess_frac"] for line in steps),
        points=_points(run, report, steps),
        cpu_s=sum(cpu_seconds(RunDir(root=run)).values()),
    )


def _points(
    run: Path, report: dict[str, Any], steps: Sequence[dict[str, Any]]
) -> tuple[Point, ...]:
    """Return the evaluations of a run with the episodes, tokens and time up to each."""
    last_step = steps[-1]["step"]
    made_s = {line["step"]: line["time_s"] for line in steps}
    success = {0: report["before"]["success"]} if report["before"] else {}
    path = run / "eval.jsonl"
    lines = read_lines(path) if path.exists() else []
    success |= {line["step"]: line["eval/success"] for line in lines}
    success[last_step] = report["after"]["success"]
    episodes, tokens = _generated(run / "journal", num_steps=last_step)
    return tuple(
        Point(
            step=step,
            success=success[step],
            num_episodes=int(episodes[step]),
            num_tokens=int(tokens[step]),
            spent_s=max(0.0, made_s.get(step, 0.0) - steps[0]["time_s"]),
        )
        for step in sorted(success)
    )


def _generated(journal: Path, *, num_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Return training episodes and their sampled tokens up to each step, both [num_steps + 1].

    An episode counts at the version of its newest token, because the engine had this version when
    the episode ended.
    """
    episodes = np.zeros(num_steps + 1, dtype=np.int64)
    tokens = np.zeros(num_steps + 1, dtype=np.int64)
    own = {each.episode_id: each for _, each in read_journal(journal)}  # Each episode once.
    for trajectory in own.values():
        if trajectory.kind is EpisodeKind.TRAIN and trajectory.loss_mask.any():
            step = min(int(trajectory.versions.max()) + 1, num_steps)
            episodes[step] += 1
            tokens[step] += int(trajectory.loss_mask.sum())
    return episodes.cumsum(), tokens.cumsum()


def begin(made: Path, overrides: Sequence[str]) -> None:
    """Record the settings of a run, so that it is only resumed with the same ones.

    Raises: ConfigError: it was begun with other settings.
    """
    record = made.with_name(f"{made.name}.settings")
    if not record.exists():
        write_atomically(record, json.dumps([*overrides]))
    elif sorted(json.loads(record.read_text(encoding="utf-8"))) != sorted(overrides):
        raise ConfigError(
            f"{made} was begun with other settings ({record.name}): give study.folder=NAME for"
            f" another study, or remove {made} and {record}"
        )
