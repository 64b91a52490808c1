"""What the measured pace means for this configuration: gate, lag bounds, leases of an actor."""

from typing import Any

from common.config.run_config import RunConfig, TrainMode
from common.wire.messages import LagBound
from learner.scheduler.dispatch.budget import lag_bound, lease_cap, needed_ahead_steps
from learner.scheduler.dispatch.pace import Pace
from learner.scheduler.members.members import Member

NUM_TRIAL_GROUPS = 2  # that an actor of unknown speed gets while the run is going


class Limits:
    """Bounds that hold from one step to the next, so that all of a step is judged alike."""

    def __init__(self, cfg: RunConfig) -> None:
        self._cfg = cfg
        self.max_ahead_steps = cfg.scheduler.max_ahead_steps  # the learner may ask for less
        self.needed_ahead_steps = 0  # so that the learner never waits; 0: not known
        self.lag_bounds: list[LagBound] = []  # those wider than `learner.max_lag_steps`

    def update(self, pace: Pace, *, max_ahead_steps: int) -> None:
        """Draw the consequences of a step."""
        self.max_ahead_steps = max_ahead_steps
        self.needed_ahead_steps = self._needed_ahead_steps(pace)
        bounds = [
            LagBound(env=env, horizon=horizon, max_lag_steps=self._bound(pace, env, horizon))
            for env, horizon in pace.kinds()
        ]
        least = self._cfg.learner.max_lag_steps
        self.lag_bounds = [bound for bound in bounds if bound.max_lag_steps > least]

    def _needed_ahead_steps(self, pace: Pace) -> int:
        cfg = self._cfg
        if cfg.scheduler.gate_margin == 0:
            return 0
        return needed_ahead_steps(
            busy_s=pace.steady_busy_s,
            group_s=pace.group_s,
            signal_frac=pace.signal_frac,
            margin=cfg.scheduler.gate_margin * pace.boost,
        )

    def _bound(self, pace: Pace, env: str, horizon: int) -> int:
        return lag_bound(
            self._cfg.learner.max_lag_steps,
            max_stretch=self._cfg.scheduler.max_stretch,
            episode_s=pace.episode_s(env, horizon),
            step_period_s=pace.step_period_s,
            max_ahead_steps=self._cfg.scheduler.max_ahead_steps,
        )

    def lease_limit(self, pace: Pace, member: Member) -> int | None:
        """Return the most episodes that an actor may hold beside others; None: as many as it likes.

        Bound are those whose episodes take longer than others', and newcomers. Where all are as
        slow nobody else would play them sooner, and to hold fewer makes none of them fresher. In
        lockstep a batch is opened at once, and whoever asks first takes it.
        """
        cfg = self._cfg
        is_sync = cfg.train.mode is TrainMode.SYNC
        if is_sync or not cfg.scheduler.size_leases or pace.step_period_s is None:
            return None
        if member.episodes_per_s is None:
            return NUM_TRIAL_GROUPS * cfg.groups.size
        if not member.is_slow:
            return None
        num_waiting = min(self.max_ahead_steps, cfg.scheduler.max_ahead_steps)
        return lease_cap(
            episodes_per_s=member.episodes_per_s,
            step_period_s=pace.step_period_s,
            num_steps=max(1, cfg.learner.max_lag_steps - num_waiting),
        )

    def snapshot(self) -> dict[str, Any]:
        """Return the exact state as JSON."""
        return {
            "max_ahead_steps": self.max_ahead_steps,
            "needed_ahead_steps": self.needed_ahead_steps,
            "lag_bounds": [[b.env, b.horizon, b.max_lag_steps] for b in self.lag_bounds],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over the state of `snapshot`."""
        self.max_ahead_steps = state["max_ahead_steps"]
        self.needed_ahead_steps = state["needed_ahead_steps"]
        self.lag_bounds = [
            LagBound(env=env, horizon=horizon, max_lag_steps=steps)
            for env, horizon, steps in state["lag_bounds"]
        ]
