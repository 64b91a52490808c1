"""The simulated work: turns and durations of episodes, drawn or resampled from a finished run."""

import itertools
import json
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Protocol

import numpy as np

from common.config.algorithm import AlgorithmSection
from common.config.horizon import MAX_TURNS, HorizonKind, HorizonUnit
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.store.run_dir import RunDir
from common.text import counted
from common.wire.messages import EndReason, EpisodeKind, PolicyKind, Trajectory
from learner.journal.journal import read_journal
from scheduler.curriculum.catalogue import HubCatalogue, SubsetEntry
from tools.simulator.config import SimulatorConfig, SimulatorSection

NUM_ITEMS = 1000  # Number of items in each subset.
ENDLESS_STEPS = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedEpisode:
    """The predetermined result of one episode, on an actor of speed 1."""

    num_turns: int
    wall_s: float
    num_tokens: int  # Number of tokens that the learner computes with.
    num_sampled_tokens: int  # Number of those that the policy samples.
    worth: float  # Reward that the members of a group are compared by.
    is_success: bool
    end_reason: EndReason


class Workload(Protocol):
    """A model of episodes and step times."""

    def group(
        self, rng: Random, *, horizon: int, stage: int, version: int, size: int
    ) -> list[SimulatedEpisode]:
        """Return the members of a group that is opened at this version."""
        ...

    def step_s(self, rng: Random, num_tokens: int, *, version: int) -> float:
        """Return the seconds from a batch of `num_tokens` to its published weights."""
        ...


class SampledWorkload:
    """Log-normal seconds per turn and turns per episode.

    Item difficulty follows a beta distribution.

    Example: 8 turns of 3.5 s take 28 s; with `tail_frac` 0.02 and `tail_factor` 10 one episode in
    fifty takes 280 s. If the policy solves an item with probability 0.9, a group of eight has no
    signal with probability 0.9^8 + 0.1^8.
    """

    def __init__(self, cfg: SimulatorSection, *, unit: HorizonUnit = HorizonUnit.TURNS) -> None:
        """Create a workload whose episodes are cut by a horizon in this unit."""
        self._cfg = cfg
        self._unit = unit
        self._mean_log_turns = math.log(cfg.num_turns)
        self._mean_log_turn_s = math.log(cfg.turn_s + cfg.env_s)
        self._alpha = 2 * cfg.success
        self._beta = 2 * (1 - cfg.success)

    def group(
        self, rng: Random, *, horizon: int, stage: int, version: int, size: int
    ) -> list[SimulatedEpisode]:
        """Return the members. They share only the item's difficulty."""
        solved_frac = rng.betavariate(self._alpha, self._beta)
        return [self._play(rng, horizon, solved_frac) for _ in range(size)]

    def _play(self, rng: Random, horizon: int, solved_frac: float) -> SimulatedEpisode:
        """Return one episode, cut by its horizon."""
        cfg = self._cfg
        num_turns = max(1, round(rng.lognormvariate(self._mean_log_turns, cfg.num_turns_sigma)))
        turn_s = rng.lognormvariate(self._mean_log_turn_s, cfg.turn_sigma)
        most = max(1, self._most_turns(horizon, turn_s))
        is_cut = num_turns > most
        num_turns = min(num_turns, most)
        wall_s = num_turns * turn_s
        if rng.random() < cfg.tail_frac:
            wall_s *= cfg.tail_factor
        is_success = not is_cut and rng.random() < solved_frac
        return SimulatedEpisode(
            num_turns=num_turns,
            wall_s=wall_s,
            num_tokens=num_turns * cfg.turn_tokens,
            num_sampled_tokens=num_turns * cfg.turn_tokens,
            worth=float(is_success),
            is_success=is_success,
            end_reason=EndReason.HORIZON if is_cut else EndReason.DONE,
        )

    def _most_turns(self, horizon: int, turn_s: float) -> int:
        """Return the maximum number of turns in a horizon. A turn's tokens all count as sampled."""
        match self._unit:
            case HorizonUnit.TURNS:
                return horizon
            case HorizonUnit.TOKENS:
                return horizon // self._cfg.turn_tokens
            case HorizonUnit.SECONDS:
                return math.ceil(horizon / turn_s)

    def step_s(self, rng: Random, num_tokens: int, *, version: int) -> float:
        """Return a constant plus the time for the tokens at the learner's rate."""
        return self._cfg.step_s + num_tokens / self._cfg.learner_tokens_per_s


def for_simulation(cfg: SimulatorConfig, *, is_endless: bool = False) -> SimulatorConfig:
    """Return the configuration to simulate, without evaluation before and after the run.

    With `is_endless` or a limit in hours it has no last step.
    """
    evaluation = replace(cfg.eval, before=False, after=False)
    num_steps = ENDLESS_STEPS if is_endless or cfg.simulator.hours else cfg.train.num_steps
    return replace(cfg, eval=evaluation, train=replace(cfg.train, num_steps=num_steps))


def catalogue_of(cfg: RunConfig) -> HubCatalogue:
    """Return a catalogue in which no item ends earlier than the longest horizon."""
    envs: dict[str, dict[str, SubsetEntry]] = {}
    for task in cfg.tasks:
        name = cfg.horizon.name_of(task.env, task.subset)
        is_in_turns = cfg.horizon.unit is HorizonUnit.TURNS
        max_turns = max(cfg.horizon.policy(name).stages) if is_in_turns else MAX_TURNS
        entry = SubsetEntry(num_train=NUM_ITEMS, num_test=NUM_ITEMS, max_turns=max_turns)
        for bound in (0, *cfg.curriculum.bounds()):
            envs.setdefault(task.env, {})[task.items(bound)] = entry
    return HubCatalogue(envs=envs)


def at_longest_horizon(cfg: SimulatorConfig) -> SimulatorConfig:
    """Return the configuration with the longest horizon of its curriculum for all episodes."""
    per_env = {
        env: replace(override, kind=HorizonKind.FIXED.value)
        for env, override in cfg.horizon.per_env.items()
    }
    horizon = replace(cfg.horizon, kind=HorizonKind.FIXED, per_env=per_env)
    return replace(cfg, horizon=horizon)


def with_ahead(cfg: SimulatorConfig, value: int, *, max_lag_steps: int) -> SimulatorConfig:
    """Return a configuration that opens groups this many steps ahead."""
    scheduler = replace(cfg.scheduler, max_ahead_steps=value)
    return replace(
        cfg, scheduler=scheduler, learner=replace(cfg.learner, max_lag_steps=max_lag_steps)
    )


def num_engines(cfg: SimulatorConfig) -> int:
    """Return the number of simulated engines. Each takes part in the run as an actor of its own."""
    return cfg.simulator.num_actors or cfg.actor.num_actors * cfg.actor.engines_per_process


def with_actors(cfg: SimulatorConfig, value: int) -> SimulatorConfig:
    return replace(cfg, simulator=replace(cfg.simulator, num_actors=value))


def with_size(cfg: SimulatorConfig, value: int) -> SimulatorConfig:
    """Return a configuration with groups of this size and about as many episodes per step."""
    groups = cfg.groups
    per_step = groups.per_step * groups.size // value
    min_size = max(2, round(groups.min_size * value / groups.size))
    return replace(cfg, groups=replace(groups, size=value, per_step=per_step, min_size=min_size))


def synthetic_trajectory(
    token_ids: Sequence[int] | np.ndarray,
    loss_mask: Sequence[int] | np.ndarray,
    *,
    group_id: str,
    member: int,
    version: int = 0,
    **changes: Any,
) -> Trajectory:
    """Return a training episode of one turn that solved its task.

    Args:
        token_ids: [seq].
        loss_mask: [seq], true on sampled tokens.
        version: version of the policy that sampled, and of the group.
        changes: values of other `Trajectory` fields that replace the defaults.
    """
    mask = np.asarray(loss_mask, dtype=bool)
    plain: dict[str, Any] = {
        "episode_id": f"{group_id}/{member}",
        "group_id": group_id,
        "member": member,
        "attempt": 0,
        "kind": EpisodeKind.TRAIN,
        "policy": PolicyKind.MODEL,
        "env": "toy",
        "item_id": "toy-train-0",
        "seed": 0,
        "horizon": 4,
        "horizon_stage": 0,
        "opened_at_version": version,
        "actor": "actor-0",
        "end_reason": EndReason.DONE,
        "error": "",
        "reward": 1.0,
        "is_success": True,
        "num_turns": 1,
        "num_invalid_actions": 0,
        "generate_s": 0.0,
        "env_s": 0.0,
        "wall_s": 0.0,
        "token_ids": np.asarray(token_ids, dtype=np.int32),
        "loss_mask": mask,
        "logprobs": np.zeros(len(mask), dtype=np.float32),
        "versions": np.where(mask, version, -1).astype(np.int32),
        "turn_ids": np.zeros(len(mask), dtype=np.int32),
        "invalid_turns": np.zeros(1, dtype=bool),
        "turn_scores": np.ones(1, dtype=np.float32),
    }
    return Trajectory(**plain | changes)


NEIGHBOURS = 32  # Number of groups or steps on either side of the current version to sample from.
MIN_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPace:
    """The measured pace of a run, with the names of the simulator's predictions."""

    num_steps: int
    steps_per_h: float
    lag_mean: float  # Mean over sampled tokens.
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
        num_sampled_tokens=int(trajectory.loss_mask.sum()),
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
    lags = [line["offpolicy/lag_mean"] for line in later]
    num_sampled = [line["train/num_sampled_tokens"] for line in later]
    return MeasuredPace(
        num_steps=len(lines),
        steps_per_h=3600.0 * len(later) / seconds,
        lag_mean=float(np.average(lags, weights=num_sampled)),
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
