"""The gate: how many groups may be opened, and how many ready groups make a batch."""

import math
from dataclasses import dataclass

from common.config.groups import GroupsSection
from common.config.scheduler import SchedulerSection
from common.config.train import TrainMode, TrainSection
from common.text import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class GateState:
    """Input of the gate."""

    version: int
    num_open: int  # Groups whose members have not all arrived.
    num_ready: int  # Groups complete at the learner, not yet trained.
    num_filtered: int  # Groups without signal since the last step; new groups replaced them.
    max_ahead_steps: int  # Steps ahead that the learner allows; at most the configured number.
    needed_ahead_steps: int  # Steps ahead with which the learner never waits; 0: not known.


@dataclass(frozen=True, slots=True, kw_only=True)
class GateVerdict:
    """How many groups may be opened, and the reason for the limit."""

    num_allowed: int
    reason: str


@dataclass(frozen=True, slots=True)
class StalenessThrottle:
    """Decides how many groups may be open and how many make a batch; the learner follows it.

    Groups without signal are replaced. `groups.max_oversample` bounds how many groups are drawn for
    one step. If the bound is reached, the step trains on a smaller batch.
    """

    groups: GroupsSection
    scheduler: SchedulerSection
    train: TrainSection

    @property
    def is_sync(self) -> bool:
        """True in sync mode: a round of groups opens at once, after the previous round is over."""
        return self.train.mode is TrainMode.SYNC

    @property
    def max_drawn(self) -> int:
        """Most groups drawn for one step."""
        return math.ceil(self.groups.max_oversample * self.groups.per_step)

    @property
    def max_groups_of_step(self) -> int:
        """Most groups open, ready or filtered between two steps; async adds the steps ahead."""
        ahead = 0 if self.is_sync else self.scheduler.max_ahead_steps
        return self.max_drawn + ahead * self.groups.per_step

    def is_oversampled(self, state: GateState) -> bool:
        """True if no more groups are drawn for this step: the learner trains a smaller batch.

        If no group is open or ready, the learner has no batch at all, so the bound does not apply.
        """
        num_ahead = state.num_open + state.num_ready
        return num_ahead > 0 and num_ahead + state.num_filtered >= self.max_groups_of_step

    def num_batch_groups(self, state: GateState) -> int:
        """Return how many ready groups make the next batch; 0: in sync mode, the round is not over.

        The number is `groups.per_step`, or less if so many groups were filtered that the bound on
        drawn groups is reached. In sync mode a batch is ready only between two rounds, independent
        of the order in which members arrive.

        Example (per_step 4, max_oversample 2): with 6 filtered groups two ready ones make a batch.
        """
        per_step = self.groups.per_step
        least = min(per_step, max(1, self.max_drawn - state.num_filtered))
        if not self.is_sync:
            return least
        is_round_over = state.num_open == 0 and state.num_ready >= least
        return min(state.num_ready, per_step) if is_round_over else 0

    def allowed(self, state: GateState) -> GateVerdict:
        """Return how many groups may be opened.

        async: open and ready groups together are at most the groups of the current step and of the
            next `max_ahead_steps` steps. The number is lower if the measured pace needs fewer, or
            if the rest of the run cannot train so many.
        sync: none while a group is open; then the number that the step still lacks.
        """
        num_ahead = state.num_open + state.num_ready
        per_step = self.groups.per_step
        if self.is_oversampled(state):
            reason = f"gate: no more groups for this step, {state.num_filtered} had no signal"
            return GateVerdict(num_allowed=0, reason=reason)
        if self.is_sync and state.num_open > 0:
            reason = f"sync: {counted(state.num_open, 'group is', 'groups are')} open"
            return GateVerdict(num_allowed=0, reason=reason)
        limit = per_step if self.is_sync else self._limit_ahead(state) * per_step
        if num_ahead >= limit:
            reason = f"gate: {counted(num_ahead, 'group is', 'groups are')} ahead of the learner"
            return GateVerdict(num_allowed=0, reason=reason)
        budget = self.max_groups_of_step - state.num_filtered - num_ahead
        num_allowed = min(limit - num_ahead, budget) if budget > 0 else per_step
        return GateVerdict(num_allowed=num_allowed, reason="")

    def _limit_ahead(self, state: GateState) -> int:
        """Return for how many steps, the current one included, groups may be open or ready."""
        ahead = min(state.max_ahead_steps, self.scheduler.max_ahead_steps)
        if state.needed_ahead_steps:
            ahead = min(ahead, state.needed_ahead_steps)
        return min(ahead + 1, max(self.train.num_steps - state.version, 1))
