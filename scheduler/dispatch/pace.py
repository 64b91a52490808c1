"""The measured pace of a run: seconds of episodes, groups and steps."""

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from scheduler.state import FIXED, VOLATILE

NUM_REMEMBERED = 128  # Last episodes kept of each environment and horizon.
MIN_EPISODES = 20  # Episodes before their quantile is used.
QUANTILE = 0.95
WEIGHT = 0.1  # Weight of a new step or group in the exponential means.
MIN_STEPS = 5  # Steps before their mean is used: the first ones are atypical.
MIN_SIGNAL_FRAC = 0.1
WAIT_FRAC = 0.05  # Share of a step; a learner that waits longer needs more groups in flight.
Kind = tuple[str, int]  # Environment and horizon.
Figures = tuple[float, float]  # Seconds: the quantile and the median.
BOOST_UP = 1.25
BOOST_DOWN = 0.98
MAX_BOOST = 8.0


@dataclass(slots=True)
class Pace:
    """Measurements from which the gate and the limits are computed. All means are exponential.

    Example: two groups took 2 s and 4 s to fill -> group_s is 2, then 2.2. The learner waited for
    the third batch -> boost 1.25, and 2 % less after every step that did not wait.
    """

    group_s: float | None = None  # Seconds from the opening of a group to its last member.
    signal_frac: float = 1.0  # Share of complete groups that have signal.
    busy_s: float | None = None  # Seconds of a step, without the wait for its batch.
    step_period_s: float | None = None  # Seconds from one step to the next.
    boost: float = 1.0  # Factor on the gate's margin.
    num_steps: int = 0  # Steps with known duration.
    last_step_at: float | None = field(default=None, metadata=VOLATILE)  # Time of the core's clock.
    # Seconds of the last episodes.
    episodes: dict[Kind, list[float]] = field(default_factory=dict[Kind, list[float]])
    _figures: dict[Kind, Figures] = field(default_factory=dict[Kind, Figures], metadata=FIXED)

    def after_restore(self) -> None:
        """Clear the cached quantiles."""
        self._figures = {}

    def add_episode(self, env: str, horizon: int, wall_s: float) -> None:
        """Record the duration of an episode that ended by itself."""
        key = (env, horizon)
        seen = self.episodes.setdefault(key, [])
        seen.append(round(wall_s, 3))
        del seen[:-NUM_REMEMBERED]
        self._figures.pop(key, None)

    def add_group(self, seconds: float | None, *, has_signal: bool) -> None:
        """Record a complete group; `seconds` is None if the time of its opening is not known."""
        if seconds is not None:
            self.group_s = _mean(self.group_s, seconds)
        self.signal_frac = max(MIN_SIGNAL_FRAC, _mean(self.signal_frac, float(has_signal)))

    def add_step(self, now: float, *, busy_s: float | None, wait_s: float | None) -> None:
        """Record a step. Durations that the learner did not report are None."""
        if self.last_step_at is not None and now > self.last_step_at:
            self.step_period_s = _mean(self.step_period_s, now - self.last_step_at)
        self.last_step_at = now
        if busy_s is None or wait_s is None or busy_s <= 0:
            return
        self.num_steps += 1
        self.busy_s = _mean(self.busy_s, busy_s)
        is_waiting = wait_s > WAIT_FRAC * busy_s
        factor = BOOST_UP if is_waiting else BOOST_DOWN
        self.boost = min(MAX_BOOST, max(1.0, self.boost * factor))

    @property
    def steady_busy_s(self) -> float | None:
        """Seconds of a step without waiting, after the first `MIN_STEPS` steps; else None."""
        return self.busy_s if self.num_steps >= MIN_STEPS else None

    def episode_s(self, env: str, horizon: int) -> float | None:
        """Return the seconds that 95 % of such episodes stay below; None if there is no data.

        For a horizon without data the longest shorter horizon is scaled in proportion.
        """
        horizons = [h for e, h in self.episodes if e == env and self._is_known((e, h))]
        shorter = [h for h in horizons if h <= horizon]
        if shorter:
            nearest = max(shorter)
            return self._figures_of((env, nearest))[0] * horizon / nearest
        return self._figures_of((env, min(horizons)))[0] if horizons else None

    def median_s(self, env: str, horizon: int) -> float | None:
        """Return the seconds that half of such episodes stay below; None with too little data."""
        key = (env, horizon)
        is_known = key in self.episodes and self._is_known(key)
        return self._figures_of(key)[1] if is_known else None

    def kinds(self) -> Iterator[Kind]:
        """Yield every (environment, horizon) with at least `MIN_EPISODES` episodes."""
        return (key for key in self.episodes if self._is_known(key))

    def _is_known(self, key: Kind) -> bool:
        return len(self.episodes[key]) >= MIN_EPISODES

    def _figures_of(self, key: Kind) -> Figures:
        """Return the quantile and the median of the durations, computed once per change."""
        if key not in self._figures:
            ordered = sorted(self.episodes[key])
            quantile = ordered[math.ceil(QUANTILE * len(ordered)) - 1]
            self._figures[key] = (quantile, statistics.median(ordered))
        return self._figures[key]

    def report(self) -> dict[str, Any]:
        """Return the measurements for the status; None if not known."""
        return {
            "group_s": self.group_s,
            "signal_frac": self.signal_frac,
            "busy_s": self.busy_s,
            "step_period_s": self.step_period_s,
            "boost": self.boost,
            "episode_p95_s": {f"{e}@{h}": self._figures_of((e, h))[0] for e, h in self.kinds()},
        }


def _mean(mean: float | None, value: float) -> float:
    return value if mean is None else mean + WEIGHT * (value - mean)
