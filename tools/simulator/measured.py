"""Measurements of a finished run: episodes and steps to sample, and the pace to compare with."""

import itertools
import json
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from common.config.algorithm import AlgorithmSection
from common.errors import ConfigError
from common.store.run_dir import RunDir
from common.text import counted
from common.wire.messages import EpisodeKind, Trajectory
from learner.journal.journal import read_journal
from tools.simulator.workload import SimulatedEpisode

NEIGHBOURS = 32  # Number of groups or steps on either side of the current version to sample from.
MIN_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPace:
    """The measured pace of a run, with the names of the simulator's predictions."""

    num_steps: int
    steps_per_h: float
    lag_mean: float  # Mean over tokens.
    learner_wait_frac: float  # Fraction of the time.


class MeasuredWorkload:
    """Resamples whole groups of a run, from about the same version and the same horizon stage.

    A smaller group is a random part of the members. A larger group repeats members and therefore
    underestimates the signal. The seconds of an episode depend on the run's own machine and load.
    """

    def __init__(
        self,
        groups: dict[int, list[tuple[int, list[SimulatedEpisode]]]],
        steps: list[tuple[float, float]],
    ) -> None:
        """Sort the measurements.

        Args:
            groups: by horizon stage, (version at opening, members); none is empty.
            steps: in order, (tokens, seconds from the batch to its weights), two or more.
        """
        self._groups = {
            stage: sorted(seen, key=lambda each: each[0]) for stage, seen in groups.items()
        }
        self._versions = {stage: [v for v, _ in seen] for stage, seen in self._groups.items()}
        num_tokens, seconds = np.array([each[0] for each in steps]), np.array([s for _, s in steps])
        slope = 0.0
        if num_tokens.std() > 0:
            slope = max(0.0, float(np.polyfit(num_tokens, seconds, 1)[0]))
        self._s_per_token = slope
        self._rest_s = [float(s - slope * n) for n, s in steps]

    def group(
        self, rng: Random, *, horizon: int, stage: int, version: int, size: int
    ) -> list[SimulatedEpisode]:
        """Return members of a group that the run opened at about this version."""
        stage = min(self._groups, key=lambda known: (abs(known - stage), known))
        seen = self._groups[stage]
        at = bisect_left(self._versions[stage], version)
        members = seen[_near(rng, at, len(seen))][1]
        members = rng.sample(members, len(members))
        return [members[i % len(members)] for i in range(size)]

    def step_s(self, rng: Random, num_tokens: int, *, version: int) -> float:
        """Return the seconds of a step: a linear term in tokens plus the rest of a similar step."""
        rest_s = self._rest_s[_near(rng, version, len(self._rest_s))]
        return max(0.001, rest_s + self._s_per_token * num_tokens)


def _near(rng: Random, at: int, num: int) -> int:
    """Return a random index below `num` that is close to `at`."""
    low = max(0, min(at, num - 1) - NEIGHBOURS)
    return rng.randrange(low, min(num, low + 2 * NEIGHBOURS))


def load_workload(path: Path, algorithm: AlgorithmSection) -> MeasuredWorkload:
    """Return the workload of a run. Raises: ConfigError: the run is missing or too short."""
    lines = _metrics(path)
    steps = [
        (now["train/num_tokens"], now["time_s"] - before["time_s"] - now["wait/batch_s"])
        for before, now in itertools.pairwise(lines)
    ]
    seen: dict[str, tuple[int, int, list[SimulatedEpisode]]] = {}
    for _, trajectory in read_journal(RunDir(root=path).journal):
        is_failed = trajectory.end_reason.is_infrastructure_failure
        if trajectory.kind is not EpisodeKind.TRAIN or is_failed:
            continue
        stamp = (trajectory.horizon_stage, trajectory.opened_at_version)
        entry = seen.setdefault(trajectory.group_id, (*stamp, []))
        entry[2].append(_play(trajectory, algorithm))
    groups: dict[int, list[tuple[int, list[SimulatedEpisode]]]] = {}
    for stage, version, members in seen.values():
        groups.setdefault(stage, []).append((version, members))
    if not groups:
        raise ConfigError(
            f"simulator.from_run={path}: the journal has no training episode; choose a run that"
            " has made steps"
        )
    return MeasuredWorkload(groups, steps)


def _play(trajectory: Trajectory, algorithm: AlgorithmSection) -> SimulatedEpisode:
    """Return an episode of the run as a simulated one."""
    invalid_frac = trajectory.num_invalid_actions / max(1, trajectory.num_turns)
    return SimulatedEpisode(
        num_turns=trajectory.num_turns,
        wall_s=trajectory.wall_s,
        num_tokens=len(trajectory.token_ids),
        worth=trajectory.reward - algorithm.invalid_action_penalty * invalid_frac,
        is_success=trajectory.is_success,
        end_reason=trajectory.end_reason,
    )


def load_measured(path: Path) -> MeasuredPace:
    """Return the pace of a run without its first step, which includes the start of all roles.

    Raises: ConfigError: the run is missing or too short.
    """
    lines = _metrics(path)
    seconds = lines[-1]["time_s"] - lines[0]["time_s"]
    later = lines[1:]
    return MeasuredPace(
        num_steps=len(lines),
        steps_per_h=3600.0 * len(later) / seconds,
        lag_mean=sum(line["offpolicy/lag_mean"] for line in later) / len(later),
        learner_wait_frac=sum(line["wait/batch_s"] for line in later) / seconds,
    )


def _metrics(path: Path) -> list[dict[str, Any]]:
    """Return the measured steps of a run. Raises: ConfigError: there are too few."""
    file = RunDir(root=path).metrics
    if not file.is_file():
        raise ConfigError(f"{path}: not a run directory, {file.name} is missing")
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if line.get("step", 0) >= 1 and "wait/batch_s" in line]
    if len(steps) < MIN_STEPS:
        raise ConfigError(
            f"{path}: the run has {counted(len(steps), 'step')}, at least {MIN_STEPS} are needed"
        )
    return steps
