"""The duration of episodes and steps, sampled from distributions if no run was measured."""

import math
from dataclasses import dataclass
from random import Random
from typing import Protocol

from common.config.horizon import HorizonUnit
from common.config.offline import SimulatorSection
from common.wire.messages import EndReason


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
