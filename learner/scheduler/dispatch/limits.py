"""How old data may get, and how much must be in flight: laws of the measured pace."""

import math
from dataclasses import dataclass, field

from common.config.run_config import SchedulerSection
from common.wire.messages import LagBound
from learner.scheduler.dispatch.pace import Pace
from learner.scheduler.members.members import Member
from learner.scheduler.state import FIXED

NUM_TRIAL_GROUPS = 2  # that an actor of unknown speed gets while the run is going


@dataclass(slots=True, kw_only=True)
class Limits:
    """Bounds that hold from one step to the next, so that all of a step is judged alike."""

    scheduler: SchedulerSection = field(metadata=FIXED)
    max_lag_steps: int = field(metadata=FIXED)  # the configured bound
    group_size: int = field(metadata=FIXED)
    is_sync: bool = field(metadata=FIXED)
    max_ahead_steps: int = field(init=False)  # the learner may ask for less than the configuration
    needed_ahead_steps: int = 0  # so that the learner never waits; 0: not known
    lag_bounds: list[LagBound] = field(default_factory=list[LagBound])  # wider than configured

    def __post_init__(self) -> None:
        self.max_ahead_steps = self.scheduler.max_ahead_steps

    def update(self, pace: Pace, *, max_ahead_steps: int) -> None:
        """Draw the consequences of a step."""
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
        return lag_bound(
            self.max_lag_steps,
            max_stretch=self.scheduler.max_stretch,
            episode_s=pace.episode_s(env, horizon),
            step_period_s=pace.step_period_s,
            max_ahead_steps=self.scheduler.max_ahead_steps,
        )

    def lease_limit(self, pace: Pace, member: Member) -> int | None:
        """Return the most episodes that an actor may hold beside others; None: as many as it likes.

        Bound are those whose episodes take longer than others', and newcomers. Where all are as
        slow nobody else would play them sooner, and to hold fewer makes none of them fresher. In
        lockstep a batch is opened at once, and whoever asks first takes it.
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
    """Return the most steps of lag that an episode may have when it is consumed.

    An episode that takes five steps' time is five versions old when it arrives, and may wait
    `max_ahead_steps` more. A bound below that would discard every long episode and keep the short
    ones, so the bound follows the prediction, between the configured one and its stretch.

    Args:
        max_lag_steps: the configured bound; never tightened here.
        max_stretch: >= 1; the bound grows to at most this many times the configured one.
        episode_s: seconds that nearly all episodes of this kind stay below; None: not known.
        step_period_s: seconds between two steps; None: not known.
        max_ahead_steps: steps' worth of groups that may wait at the learner.

    Example: 4 steps configured, stretch 2, episodes of 50 s, steps of 10 s, one ahead -> 6.
    """
    if episode_s is None or not step_period_s:
        return max_lag_steps
    predicted = math.ceil(episode_s / step_period_s) + max_ahead_steps
    return min(max(predicted, max_lag_steps), int(max_lag_steps * max_stretch))


def needed_ahead_steps(
    *, busy_s: float | None, group_s: float | None, signal_frac: float, margin: float
) -> int:
    """Return how many batches must be open or ready beside that in training; 0: not known.

    A step frees the places of a whole batch at once; the groups that take them are ready
    `group_s` later, or later still where some teach nothing and are replaced. The learner never
    waits if that is done before the batches opened earlier are used up.

    Args:
        busy_s: seconds from a batch to its published weights, waiting left out.
        group_s: seconds from the opening of a group to its last member at the learner.
        signal_frac: share of groups that are worth training on, > 0.
        margin: on `group_s`, which is a mean.

    Example: steps of 2 s, groups of 3 s of which half teach something, margin 1.5 -> 5.
    """
    if not busy_s or group_s is None:
        return 0
    return max(1, math.ceil(margin * group_s / (busy_s * signal_frac)))


def lease_cap(*, episodes_per_s: float, step_period_s: float, num_steps: int) -> int:
    """Return the most episodes that an actor may hold: what it finishes in so many steps' time.

    One at least, so that the actor's speed stays measured. The gate
    holds `max_ahead_steps` + 1 batches in flight, so with more steps here than that, only actors
    slower than the mean are bound.
    """
    return max(1, math.ceil(episodes_per_s * step_period_s * num_steps))
