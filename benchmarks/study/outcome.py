"""The outcome of one run of a study, read from its files and stored as JSON."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.runs.real_run import read_lines
from common.cpu import cpu_seconds
from common.errors import ConfigError
from common.store.journal import read_journal
from common.store.run_dir import RunDir, write_atomically
from common.wire.messages import EpisodeKind, Trajectory

BINS = (4, 8, 16, 32)  # Upper bounds of the expert's turns; item i of `rooms` is in band i mod 4.
LAST_STEPS = 20  # Number of steps for the mean training success.
NAN = float("nan")
NO_INTERVAL = (NAN, NAN)
AXES = {"episodes": "num_episodes", "tokens": "num_tokens", "seconds": "spent_s"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A held-out evaluation during training, and the generated data so far."""

    step: int
    success: float
    num_episodes: int
    num_tokens: int  # Sampled tokens.
    # Seconds of training. In one process: processor seconds without evaluations. In a whole run:
    # wall seconds since the end of the first step, with concurrent evaluations.
    spent_s: float = 0.0
    # Tuples of (held-out items, solved) for `rooms`, by BINS.
    by_distance: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedResult:
    arm: str
    seed: int
    before: float  # Like the gain, NaN if the initial policy was not evaluated.
    after: float
    after_ci95: tuple[float, float]
    num_after: int  # Number of items.
    gain: float
    gain_ci95: tuple[float, float]  # Paired by item.
    trained: float  # Success of the training episodes that arrived in the last `LAST_STEPS` steps.
    num_trained: int  # Number of these episodes.
    lag_mean: float  # In steps, mean over the trained tokens.
    ess_min: float  # Minimum effective sample size of a step, as a fraction of its tokens.
    # The first is before training, the last the evaluation at the end.
    points: tuple[Point, ...] = ()
    same_as: str = ""  # Name of the identical run whose outcome was copied; "": none.
    num_skipped: int = 0  # Number of batches that the controller skipped.
    wall_s: float = 0.0  # Time from the first step to the last.
    cpu_s: float = 0.0  # Processor seconds of all its processes; 0: not measured.
    num_segments: float = 0.0  # Mean over the held-out episodes at the end; 0: not measured.
    num_row_tokens: float = 0.0  # Mean tokens of all segments of such an episode; 0: not measured.


def success_at(outcome: SeedResult, axis: str, at: np.ndarray | float) -> np.ndarray:
    """Return the success at a given spending, interpolated linearly between two evaluations."""
    spent = [float(getattr(point, AXES[axis])) for point in outcome.points]
    return np.asarray(np.interp(at, spent, [point.success for point in outcome.points]))


def budget_of(outcomes: Sequence[SeedResult], axis: str) -> float:
    """Return the spending that every run has reached: the minimum of their totals."""
    return min(float(getattr(each.points[-1], AXES[axis])) for each in outcomes)


def save_outcome(outcome: SeedResult, path: Path, overrides: Sequence[str]) -> None:
    """Write an outcome with its run's overrides, so that a study can be resumed."""
    content = {"overrides": list(overrides), "outcome": asdict(outcome)}
    write_atomically(path, f"{json.dumps(content)}\n")


def load_outcome(path: Path) -> tuple[SeedResult, list[str]]:
    """Return what `save_outcome` wrote. Raises: ConfigError: the file is not an outcome."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return msgspec.convert(content["outcome"], SeedResult), content["overrides"]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: no outcome of a run ({error}); remove it") from error


def read_outcome(run: Path, *, arm: str, seed: int) -> SeedResult:
    """Return the outcome of a whole run."""
    report = json.loads((run / "report.json").read_text(encoding="utf-8"))
    steps = [line for line in read_lines(run / "metrics.jsonl") if line["step"]]
    none = {"success": NAN, "ci95": NO_INTERVAL}
    before = report["before"] or none
    gain = report["gain"] or none
    last = [line for line in steps[-LAST_STEPS:] if "reward/success" in line]
    arrived = [line["episodes/arrived"] for line in last]
    num_tokens = [line["train/num_sampled_tokens"] for line in steps]
    lags = [line["offpolicy/lag_mean"] for line in steps]
    return SeedResult(
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
        num_skipped=sum(bool(line.get("controller/skipped")) for line in steps),
        wall_s=steps[-1].get("time_s", 0.0) - steps[0].get("time_s", 0.0),
        cpu_s=sum(cpu_seconds(RunDir(root=run)).values()),
    )


def by_distance(played: Iterable[Trajectory]) -> tuple[tuple[int, int], ...]:
    """Return (items, solved) of held-out episodes for each of `BINS`; () for other tasks."""
    counts = np.zeros((len(BINS), 2), dtype=int)
    for each in played:
        if each.env == "rooms":
            band = int(each.item_id.rpartition("-")[2]) % len(BINS)
            counts[band] += (1, each.is_success)
    return tuple((int(num), int(solved)) for num, solved in counts) if counts.any() else ()


def _points(
    run: Path, report: dict[str, Any], steps: Sequence[dict[str, Any]]
) -> tuple[Point, ...]:
    last_step = steps[-1]["step"]
    made_s = {line["step"]: line.get("time_s", 0.0) for line in steps}
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
            spent_s=max(0.0, made_s.get(step, 0.0) - steps[0].get("time_s", 0.0)),
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


def is_begun(made: Path, overrides: Sequence[str]) -> bool:
    """Return whether `begin` has recorded a run. Raises: ConfigError: it has other settings."""
    record = made.with_name(f"{made.name}.told")
    if not record.exists():
        return False
    if sorted(json.loads(record.read_text(encoding="utf-8"))) != sorted(overrides):
        raise ConfigError(
            f"{made} was begun with other settings ({record.name}): give study.folder=NAME for"
            f" another study, or remove {made} and {record}"
        )
    return True


def begin(made: Path, overrides: Sequence[str]) -> None:
    """Record the settings of a run, so that it is only resumed with the same ones."""
    if not is_begun(made, overrides):
        write_atomically(made.with_name(f"{made.name}.told"), json.dumps([*overrides]))
