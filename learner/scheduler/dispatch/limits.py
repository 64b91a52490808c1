"""What the measured pace means for this configuration: gate, lag bounds, leases of an actor."""

from dataclasses import dataclass, field

from common.config.run_config import SchedulerSection
from common.wire.messages import LagBound
from learner.scheduler.dispatch.budget import lag_bound, lease_cap, needed_ahead_steps
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
        self.needed_ahead_steps = self._needed_ahead_steps(pace)
        bounds = [
            LagBound(env=env, horizon=horizon, max_lag_steps=self._bound(pace, env, horizon))
            for env, horizon in pace.kinds()
        ]
        self.lag_bounds = [bound for bound in bounds if bound.max_lag_steps > self.max_lag_steps]

    def _needed_ahead_steps(self, pace: Pace) -> int:
        if self.scheduler.gate_margin == 0:
            return 0
        return needed_ahead_steps(
            busy_s=pace.steady_busy_s,
            group_s=pace.group_s,
            signal_frac=pace.signal_frac,
            margin=self.scheduler.gate_margin * pace.boost,
        )

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
