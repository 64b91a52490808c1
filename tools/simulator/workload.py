"""The simulated work: turns and durations of episodes, and the configuration that is simulated."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Protocol

import numpy as np

from common.config.horizon import MAX_TURNS, HorizonKind, HorizonUnit
from common.config.run_config import RunConfig
from common.wire.messages import EndReason, EpisodeKind, PolicyKind, Trajectory
from scheduler.curriculum.catalogue import HubCatalogue, SubsetEntry
from tools.simulator.config import SimulatorConfig, SimulatorSection

NUM_ITEMS = 1000  # Number of items in each subset.
ENDLESS_STEPS = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedEpisode:
    """The predetermined result of one episode, on an actor of speed 1."""

    num_turns: int
    wall_s: float
    num_tokens: int  # Number of tokens that the learner trains on.
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
