"""Limits on the age of data and on the work in flight, derived from the measured pace."""

import math
from dataclasses import dataclass, field

from common.config.scheduler import SchedulerSection
from common.wire.messages import LagBound
from scheduler.dispatch.pace import Pace
from scheduler.members.members import RunMember
from scheduler.state import FIXED

NUM_TRIAL_GROUPS = 2  # Groups granted to an actor of unknown speed during the run.


@dataclass(slots=True, kw_only=True)
class DispatchLimits:
    """Limits that are constant between two steps, so they apply alike to all data of a step."""

    scheduler: SchedulerSection = field(metadata=FIXED)
    max_lag_steps: int = field(metadata=FIXED)  # Configured bound on the lag.
    group_size: int = field(metadata=FIXED)
    is_sync: bool = field(metadata=FIXED)
    # Steps ahead that the learner allows; at most the configured number.
    max_ahead_steps: int = field(init=False)
    needed_ahead_steps: int = 0  # Steps ahead with which the learner never waits; 0: not known.
    # Bounds that are wider than `max_lag_steps`.
    lag_bounds: list[LagBound] = field(default_factory=list[LagBound])

    def __post_init__(self) -> None:
        self.max_ahead_steps = self.scheduler.max_ahead_steps

    def update(self, pace: Pace, *, max_ahead_steps: int) -> None:
        """Recompute the limits after a step."""
        self.max_ahead_steps = max_ahead_steps
        self.needed_ahead_steps = 0
        if self.scheduler.gate_margin > 0:
            self.needed_ahead_steps = needed_ahead_steps(
                busy_s=pace.steady_busy_s,
                group_s=pace.group_s,
                signal_frac=pace.signal_frac,
                margin=self.scheduler.gate_margin * pace.boost,
            )
        bounds = [
            LagBound(env=env, horizon=horizon, max_lag_steps=self._bound(pace, env, horizon))
            for env, horizon in pace.kinds()
        ]
        self.lag_bounds = [bound for bound in bounds if bound.max_lag_steps > self.max_lag_steps]

    def _bound(self, pace: Pace, env: str, horizon: int) -> int:
        """Return the lag bound of an environment and horizon."""
        return lag_bound(
            self.max_lag_steps,
            max_stretch=self.scheduler.max_stretch,
            episode_s=pace.episode_s(env, horizon),
            step_period_s=pace.step_period_s,
            max_ahead_steps=self.scheduler.max_ahead_steps,
        )

    def lease_limit(self, pace: Pace, member: RunMember) -> int | None:
        """Return the most episodes that an actor may hold beside other actors; None: no limit.

        The limit applies to actors with slower episodes than the rest, and to new actors. If all
        actors are equally slow, none of them would play the episodes sooner, and a limit would not
        make the data fresher. In sync mode a batch opens at once, and the first actor to ask gets
        it.
        """
        if self.is_sync or not self.scheduler.size_leases or pace.step_period_s is None:
            return None
        if member.episodes_per_s is None:
            return NUM_TRIAL_GROUPS * self.group_size
        if not member.is_slow:
            return None
        num_waiting = min(self.max_ahead_steps, self.scheduler.max_ahead_steps)
        return lease_cap(
            episodes_per_s=member.episodes_per_s,
            step_period_s=pace.step_period_s,
            num_steps=max(1, self.max_lag_steps - num_waiting),
        )


def lag_bound(
    max_lag_steps: int,
    *,
    max_stretch: float,
    episode_s: float | None,
    step_period_s: float | None,
    max_ahead_steps: int,
) -> int:
    """Return the most steps of lag that an episode may have when the learner trains on it.

    An episode that takes as long as five steps is five versions old when it arrives, and may wait
    `max_ahead_steps` more. A lower bound would discard every long episode and keep the short ones.
    So the bound follows this prediction, between the configured bound and its stretch.

    Args:
        max_lag_steps: configured bound; the result is never below it.
        max_stretch: >= 1; the result is at most this many times the configured bound.
        episode_s: seconds that nearly all episodes of this kind stay below; None: not known.
        step_period_s: seconds between two steps; None: not known.
        max_ahead_steps: most steps' worth of groups that may wait at the learner.

    Example: 4 steps configured, stretch 2, episodes of 50 s, steps of 10 s, one ahead -> 6.
    """
    if episode_s is None or not step_period_s:
        return max_lag_steps
    predicted = math.ceil(episode_s / step_period_s) + max_ahead_steps
    return min(max(predicted, max_lag_steps), int(max_lag_steps * max_stretch))


def needed_ahead_steps(
    *, busy_s: float | None, group_s: float | None, signal_frac: float, margin: float
) -> int:
    """Return how many batches must be open or ready beside the one in training; 0: not known.

    A step makes room for a whole batch of new groups at once. These groups are ready `group_s`
    later, or later still if some have no signal and are replaced. The learner never waits if they
    are ready before the batches opened earlier are used up.

    Args:
        busy_s: seconds from a batch to its published weights, without waiting.
        group_s: seconds from the opening of a group to its last member at the learner.
        signal_frac: share of groups with signal, > 0.
        margin: factor on `group_s`, which is a mean.

    Example: steps of 2 s, groups of 3 s of which half have signal, margin 1.5 -> 5.
    """
    if not busy_s or group_s is None:
        return 0
    return max(1, math.ceil(margin * group_s / (busy_s * signal_frac)))


def lease_cap(*, episodes_per_s: float, step_period_s: float, num_steps: int) -> int:
    """Return the most episodes that an actor may hold: those it finishes in `num_steps` steps.

    The result is at least one, so that the actor's speed stays measured. The gate holds
    `max_ahead_steps` + 1 batches in flight. If `num_steps` is larger than that, the limit only
    affects actors slower than the mean.
    """
    return max(1, math.ceil(episodes_per_s * step_period_s * num_steps))
