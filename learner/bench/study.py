"""Studies: the same run with one thing changed at a time, over seeds, as a table."""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.bench.real_run import train
from common.store.journal import read_journal
from common.wire.messages import EpisodeKind

RUN_S = 3600.0  # for one run of a study
LAST_STEPS = 20  # over which training success is averaged


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    name: str
    overrides: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What is compared. All runs share overrides and number of steps."""

    name: str  # of the folder below runs/
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    overrides: tuple[str, ...]  # of every run
    num_at_once: int = 1  # runs side by side; in sync mode each keeps about one core busy


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A held-out evaluation while training, and what had been generated until then."""

    step: int
    success: float
    num_episodes: int
    num_tokens: int  # sampled
    wall_s: float = 0.0  # since the first step was made, evaluations beside it included


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    arm: str
    seed: int
    before: float  # as the gain, NaN if the first policy was not evaluated
    after: float
    after_ci95: tuple[float, float]
    num_after: int  # items
    gain: float
    gain_ci95: tuple[float, float]  # paired by item
    trained: float  # success of the training episodes that arrived in the last `LAST_STEPS` steps
    num_trained: int  # of those episodes
    lag_mean: float  # steps, over the trained tokens
    ess_min: float  # smallest effective sample size of a step, as a share of its tokens
    points: tuple[Point, ...]  # the first is before training, the last the evaluation at the end


def run_study(study: Study, *, folder: Path) -> list[Outcome]:
    """Run below `folder` what is not finished yet, and return all outcomes, arm by arm.

    Raises: LongstrideError: a run failed; names it and its log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    todo = [(arm, seed) for seed in study.seeds for arm in study.arms]
    with ThreadPoolExecutor(study.num_at_once) as pool:
        list(pool.map(lambda each: _run(study, *each, folder=folder), todo))
    return [
        read_outcome(folder / _run_name(arm, seed), arm=arm.name, seed=seed)
        for arm in study.arms
        for seed in study.seeds
    ]


def folders_of(study: Study, *, folder: Path) -> dict[str, list[Path]]:
    """Return the run directories of every arm."""
    return {a.name: [folder / _run_name(a, seed) for seed in study.seeds] for a in study.arms}


def _run_name(arm: Arm, seed: int) -> str:
    return f"{arm.name}-seed{seed}"


def _run(study: Study, arm: Arm, seed: int, *, folder: Path) -> None:
    name = _run_name(arm, seed)
    if (folder / name / "report.json").exists():
        return
    overrides = [f"run.seed={seed}", "log.live=false", *merged(study.overrides, arm.overrides)]
    train(name, overrides, folder=folder, timeout_s=RUN_S)


def merged(overrides: Sequence[str], own: Sequence[str]) -> list[str]:
    """Return all overrides, each key once: an arm's own value holds, and of two the later one."""
    by_key = {each.partition("=")[0]: each for each in (*overrides, *own)}
    return list(by_key.values())


def read_outcome(run: Path, *, arm: str, seed: int) -> Outcome:
    report = json.loads((run / "report.json").read_text())
    steps = [line for line in _read_lines(run / "metrics.jsonl") if line["step"]]
    none = {"success": float("nan"), "ci95": [float("nan")] * 2}
    before, gain = report["before"] or none, report["gain"] or none
    last = [line for line in steps[-LAST_STEPS:] if "reward/success" in line]
    arrived = [line["episodes/arrived"] for line in last]
    num_tokens = [line["train/num_sampled_tokens"] for line in steps]
    lags = [line["offpolicy/lag_mean"] for line in steps]
    return Outcome(
        arm=arm,
        seed=seed,
        before=before["success"],
        after=report["after"]["success"],
        after_ci95=tuple(report["after"]["ci95"]),
        num_after=report["after"]["n"],
        gain=gain["success"],
        gain_ci95=tuple(gain["ci95"]),
        trained=float(np.average([line["reward/success"] for line in last], weights=arrived)),
        num_trained=int(sum(arrived)),
        lag_mean=float(np.average(lags, weights=num_tokens)),
        ess_min=min(line["offpolicy/ess_frac"] for line in steps),
        points=_points(run, report, steps),
    )


def _points(
    run: Path, report: dict[str, Any], steps: Sequence[dict[str, Any]]
) -> tuple[Point, ...]:
    last_step = steps[-1]["step"]
    made_s = {line["step"]: line.get("time_s", 0.0) for line in steps}
    success = {0: report["before"]["success"]} if report["before"] else {}
    path = run / "eval.jsonl"
    lines = _read_lines(path) if path.exists() else []
    success |= {line["step"]: line["eval/success"] for line in lines}
    success[last_step] = report["after"]["success"]
    episodes, tokens = _generated(run / "journal", num_steps=last_step)
    return tuple(
        Point(
            step=step,
            success=success[step],
            num_episodes=int(episodes[step]),
            num_tokens=int(tokens[step]),
            wall_s=max(0.0, made_s.get(step, 0.0) - steps[0].get("time_s", 0.0)),
        )
        for step in sorted(success)
    )


def _generated(journal: Path, *, num_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Return training episodes and their sampled tokens until each step, both [num_steps + 1].

    An episode counts at the version of its newest token: it ended while that was in the engine.
    """
    episodes = np.zeros(num_steps + 1, dtype=np.int64)
    tokens = np.zeros(num_steps + 1, dtype=np.int64)
    seen: set[str] = set()
    for _, trajectory in read_journal(journal):
        is_counted = trajectory.kind is EpisodeKind.TRAIN and trajectory.loss_mask.any()
        if not is_counted or trajectory.episode_id in seen:
            continue
        seen.add(trajectory.episode_id)
        step = min(int(trajectory.versions.max()) + 1, num_steps)
        episodes[step] += 1
        tokens[step] += int(trajectory.loss_mask.sum())
    return episodes.cumsum(), tokens.cumsum()


def success_at_tokens(outcome: Outcome, num_tokens: int) -> float:
    """Return success after so many sampled tokens, linear between two evaluations."""
    points = outcome.points
    return float(np.interp(num_tokens, [p.num_tokens for p in points], [p.success for p in points]))


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def interval(value: float, ci95: tuple[float, float], *, is_gain: bool = False) -> str:
    """Return a share with its interval: `.512 [.463, .561]`, or a gain in points."""
    if is_gain:
        low, high = (100 * bound for bound in ci95)
        return f"{100 * value:+.1f} [{low:.1f}, {high:.1f}]"
    return f"{value:.3f} [{ci95[0]:.3f}, {ci95[1]:.3f}]"


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
