"""How many groups may be opened now, and how many of those that are ready make a batch."""

import math
from dataclasses import dataclass

from common.config.run_config import RunConfig, TrainMode


@dataclass(frozen=True, slots=True, kw_only=True)
class GateState:
    """What the gate looks at."""

    version: int
    num_open: int  # groups with members still to come
    num_ready: int  # groups complete at the learner, not yet trained
    num_filtered: int  # groups without signal since the last step, whose places were filled again
    max_ahead_steps: int  # the learner's wish; the configuration's at most
    needed_ahead_steps: int  # with which the learner never waits; 0: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class GateVerdict:
    """How many groups may be opened, and why no more."""

    num_allowed: int
    reason: str


def max_groups_of_step(cfg: RunConfig) -> int:
    """Return the most groups that may be open, ready or filtered between two steps.

    `groups.max_oversample` bounds what one step draws; async adds the steps that are ahead.
    """
    own = math.ceil(cfg.groups.max_oversample * cfg.groups.per_step)
    if cfg.train.mode is TrainMode.SYNC:
        return own
    return own + cfg.scheduler.max_ahead_steps * cfg.groups.per_step


def is_oversampled(cfg: RunConfig, state: GateState) -> bool:
    """True if no more groups are drawn for this step: the learner trains a short batch.

    With neither an open nor a ready group it could not, so then the bound is lifted.
    """
    num_ahead = state.num_open + state.num_ready
    return num_ahead > 0 and num_ahead + state.num_filtered >= max_groups_of_step(cfg)


def num_batch_groups(cfg: RunConfig, state: GateState) -> int:
    """Return how many ready groups make the next batch; 0: in sync mode, its round is not over.

    `groups.per_step`, fewer once so many were filtered that `groups.max_oversample` is used up.
    In sync mode a batch is ready between two rounds only, in whatever order members arrive.

    Example (per_step 4, max_oversample 2): with 6 filtered groups two ready ones make a batch.
    """
    budget = math.ceil(cfg.groups.max_oversample * cfg.groups.per_step) - state.num_filtered
    least = min(cfg.groups.per_step, max(1, budget))
    if cfg.train.mode is not TrainMode.SYNC:
        return least
    is_round_over = state.num_open == 0 and state.num_ready >= least
    return min(state.num_ready, cfg.groups.per_step) if is_round_over else 0


def allowed_groups(cfg: RunConfig, state: GateState) -> GateVerdict:
    """Return how many groups may be opened.

    async: open and ready groups together stay within the current step's and the next
        `max_ahead_steps` steps', fewer where the measured pace needs fewer, and within what the
        rest of the run can train.
    sync: nothing while a group is open; then exactly what the step still misses.
    """
    num_ahead = state.num_open + state.num_ready
    per_step = cfg.groups.per_step
    if is_oversampled(cfg, state):
        reason = f"gate: {state.num_filtered} groups of this step carried no signal, no more drawn"
        return GateVerdict(num_allowed=0, reason=reason)
    if cfg.train.mode is TrainMode.SYNC:
        if state.num_open > 0:
            return GateVerdict(num_allowed=0, reason=f"sync: {state.num_open} groups are open")
        limit = per_step
    else:
        ahead = min(state.max_ahead_steps, cfg.scheduler.max_ahead_steps)
        if state.needed_ahead_steps:
            ahead = min(ahead, state.needed_ahead_steps)
        steps_left = max(cfg.train.num_steps - state.version, 1)
        limit = min(ahead + 1, steps_left) * per_step
    if num_ahead >= limit:
        reason = f"gate: {num_ahead} groups ahead of the learner"
        return GateVerdict(num_allowed=0, reason=reason)
    budget = max_groups_of_step(cfg) - state.num_filtered - num_ahead
    num_allowed = limit - num_ahead
    return GateVerdict(num_allowed=min(num_allowed, budget) if budget > 0 else per_step, reason="")
