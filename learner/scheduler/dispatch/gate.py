"""How many groups may be opened now, and how many of those that are ready make a batch."""

import math
from dataclasses import dataclass

from common.config.run_config import GroupsSection, SchedulerSection, TrainMode, TrainSection


@dataclass(frozen=True, slots=True, kw_only=True)
class GateState:
    """What the gate looks at."""

    version: int
    num_open: int  # groups with members still to come
    num_ready: int  # groups complete at the learner, not yet trained
    num_filtered: int  # groups without signal since the last step, whose places were filled again
    max_ahead_steps: int  # as far as the learner asks for; the configuration's at most
    needed_ahead_steps: int  # with which the learner never waits; 0: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class GateVerdict:
    """How many groups may be opened, and why no more."""

    num_allowed: int
    reason: str


@dataclass(frozen=True, slots=True)
class Gate:
    """The rule of rounds and batches; the learner follows what it says.

    `groups.max_oversample` bounds how many groups are drawn for one step, where those that carry
    no signal are replaced. When it is used up, the step trains on a short batch.
    """

    groups: GroupsSection
    scheduler: SchedulerSection
    train: TrainSection

    @property
    def is_sync(self) -> bool:
        """True if a whole round of groups is opened at once, and none before it is over."""
        return self.train.mode is TrainMode.SYNC

    @property
    def max_drawn(self) -> int:
        """Groups that may be drawn for one step."""
        return math.ceil(self.groups.max_oversample * self.groups.per_step)

    @property
    def max_groups_of_step(self) -> int:
        """Groups that may be open, ready or filtered between two steps: async adds those ahead."""
        ahead = 0 if self.is_sync else self.scheduler.max_ahead_steps
        return self.max_drawn + ahead * self.groups.per_step

    def is_oversampled(self, state: GateState) -> bool:
        """True if no more groups are drawn for this step: the learner trains a short batch.

        With neither an open nor a ready group it could not, so then the bound is lifted.
        """
        num_ahead = state.num_open + state.num_ready
        return num_ahead > 0 and num_ahead + state.num_filtered >= self.max_groups_of_step

    def num_batch_groups(self, state: GateState) -> int:
        """Return how many ready groups make the next batch; 0: in sync mode, its round goes on.

        `groups.per_step`, fewer once so many were filtered that the bound is used up. In sync
        mode a batch is ready between two rounds only, in whatever order members arrive.

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

        async: open and ready groups together stay within the current step's and the next
            `max_ahead_steps` steps', fewer where the measured pace needs fewer, and within what
            the rest of the run can train.
        sync: nothing while a group is open; then exactly what the step still misses.
        """
        num_ahead = state.num_open + state.num_ready
        per_step = self.groups.per_step
        if self.is_oversampled(state):
            reason = f"gate: {state.num_filtered} groups of this step carried no signal"
            return GateVerdict(num_allowed=0, reason=f"{reason}, no more drawn")
        if self.is_sync and state.num_open > 0:
            return GateVerdict(num_allowed=0, reason=f"sync: {state.num_open} groups are open")
        limit = per_step if self.is_sync else self._limit_ahead(state) * per_step
        if num_ahead >= limit:
            reason = f"gate: {num_ahead} groups ahead of the learner"
            return GateVerdict(num_allowed=0, reason=reason)
        budget = self.max_groups_of_step - state.num_filtered - num_ahead
        num_allowed = min(limit - num_ahead, budget) if budget > 0 else per_step
        return GateVerdict(num_allowed=num_allowed, reason="")

    def _limit_ahead(self, state: GateState) -> int:
        """Return how many steps' groups may be open or ready."""
        ahead = min(state.max_ahead_steps, self.scheduler.max_ahead_steps)
        if state.needed_ahead_steps:
            ahead = min(ahead, state.needed_ahead_steps)
        return min(ahead + 1, max(self.train.num_steps - state.version, 1))
