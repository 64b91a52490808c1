"""The measured pace of a run: seconds of episodes, groups and steps."""

import math
import statistics
from collections import deque
from collections.abc import Iterator
from typing import Any

NUM_REMEMBERED = 128  # episodes of one environment and horizon
MIN_EPISODES = 20  # before their quantile says anything
QUANTILE = 0.95
WEIGHT = 0.1  # of a new step or group
MIN_STEPS = 5  # the first ones are no measure
MIN_SIGNAL_FRAC = 0.1
WAIT_FRAC = 0.05  # of a step; a learner that waits longer wants more groups in flight
BOOST_UP, BOOST_DOWN, MAX_BOOST = 1.25, 0.98, 8.0


class Pace:
    """What the gate and the bounds are computed from. All means are exponential.

    Example: two groups took 2 s and 4 s to fill -> group_s is 2, then 2.2. The learner waited for
    the third batch -> boost 1.25, and 2 % less after every step that did not wait.
    """

    def __init__(self) -> None:
        self.group_s: float | None = None  # from opening to the last member
        self.signal_frac = 1.0  # of complete groups
        self.busy_s: float | None = None  # of a step, without waiting for its batch
        self.step_period_s: float | None = None  # from one step to the next
        self.boost = 1.0  # on the gate's margin
        self._num_steps = 0
        self._last_step_at: float | None = None  # core's clock; None after a restore
        self._episodes: dict[tuple[str, int], deque[float]] = {}
        self._quantiles: dict[tuple[str, int], float] = {}  # cache
        self._medians: dict[tuple[str, int], float] = {}  # cache

    # --- in -----------------------------------------------------------------------------------

    def add_episode(self, env: str, horizon: int, wall_s: float) -> None:
        """Note how long an episode took that ended by itself."""
        key = (env, horizon)
        self._episodes.setdefault(key, deque(maxlen=NUM_REMEMBERED)).append(round(wall_s, 3))
        self._quantiles.pop(key, None)
        self._medians.pop(key, None)

    def add_group(self, seconds: float | None, *, has_signal: bool) -> None:
        """Note a complete group; `seconds` is None if the time of its opening is not known."""
        if seconds is not None:
            self.group_s = _mean(self.group_s, seconds)
        self.signal_frac = max(MIN_SIGNAL_FRAC, _mean(self.signal_frac, float(has_signal)))

    def add_step(self, now: float, *, busy_s: float | None, wait_s: float | None) -> None:
        """Note a step. What the learner did not say is None."""
        if self._last_step_at is not None and now > self._last_step_at:
            self.step_period_s = _mean(self.step_period_s, now - self._last_step_at)
        self._last_step_at = now
        if busy_s is None or wait_s is None or busy_s <= 0:
            return
        self._num_steps += 1
        self.busy_s = _mean(self.busy_s, busy_s)
        is_waiting = wait_s > WAIT_FRAC * busy_s
        factor = BOOST_UP if is_waiting else BOOST_DOWN
        self.boost = min(MAX_BOOST, max(1.0, self.boost * factor))

    # --- out ----------------------------------------------------------------------------------

    @property
    def steady_busy_s(self) -> float | None:
        """Seconds of a step without waiting, once enough were seen."""
        return self.busy_s if self._num_steps >= MIN_STEPS else None

    def episode_s(self, env: str, horizon: int) -> float | None:
        """Return the seconds that 95 % of such episodes stay below; None if nothing is known.

        A horizon never seen is predicted from the longest shorter one, in proportion.
        """
        known = [h for e, h in self._episodes if e == env and self._is_known((e, h))]
        shorter = [h for h in known if h <= horizon]
        if shorter:
            nearest = max(shorter)
            return self._quantile((env, nearest)) * horizon / nearest
        return self._quantile((env, min(known))) if known else None

    def median_s(self, env: str, horizon: int) -> float | None:
        """Return the seconds that half of such episodes stay below; None if little is known."""
        key = (env, horizon)
        if key not in self._episodes or not self._is_known(key):
            return None
        if key not in self._medians:
            self._medians[key] = statistics.median(self._episodes[key])
        return self._medians[key]

    def kinds(self) -> Iterator[tuple[str, int]]:
        """Yield every (environment, horizon) that enough is known about."""
        return (key for key in self._episodes if self._is_known(key))

    def _is_known(self, key: tuple[str, int]) -> bool:
        return len(self._episodes[key]) >= MIN_EPISODES

    def _quantile(self, key: tuple[str, int]) -> float:
        if key not in self._quantiles:
            ordered = sorted(self._episodes[key])
            self._quantiles[key] = ordered[math.ceil(QUANTILE * len(ordered)) - 1]
        return self._quantiles[key]

    def report(self) -> dict[str, Any]:
        """Return the means for the status; None where not known."""
        return {
            "group_s": self.group_s,
            "signal_frac": self.signal_frac,
            "busy_s": self.busy_s,
            "step_period_s": self.step_period_s,
            "boost": self.boost,
            "episode_p95_s": {f"{e}@{h}": self._quantile((e, h)) for e, h in self.kinds()},
        }

    # --- state --------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Return the exact state, times left out, as JSON."""
        return {
            "group_s": self.group_s,
            "signal_frac": self.signal_frac,
            "busy_s": self.busy_s,
            "step_period_s": self.step_period_s,
            "boost": self.boost,
            "num_steps": self._num_steps,
            "episodes": [[e, h, list(seen)] for (e, h), seen in self._episodes.items()],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over the state of `snapshot`; the time since the last step is not known."""
        self.group_s = state["group_s"]
        self.signal_frac = state["signal_frac"]
        self.busy_s = state["busy_s"]
        self.step_period_s = state["step_period_s"]
        self.boost = state["boost"]
        self._num_steps = state["num_steps"]
        self._last_step_at = None
        self._episodes = {
            (e, h): deque(seen, maxlen=NUM_REMEMBERED) for e, h, seen in state["episodes"]
        }
        self._quantiles, self._medians = {}, {}

    def terms(self) -> float | None:
        """Return when the last step was."""
        return self._last_step_at

    def restore_terms(self, last_step_at: float | None) -> None:
        """Take over the time of `terms`."""
        self._last_step_at = last_step_at


def _mean(known: float | None, value: float) -> float:
    return value if known is None else known + WEIGHT * (value - known)
