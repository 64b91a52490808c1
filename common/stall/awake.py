"""Time as a process that may be stopped for a while counts it."""

import time
from collections.abc import Callable

ASLEEP_S = 3.0  # between two looks of a clock that is looked at every second: nobody was awake


class AwakeClock:
    """Monotonic seconds without those in which this process stood still.

    It finds them by nobody having looked, so somebody has to look every second.

    Example: looked at after 1 s, after 2 s, then SIGSTOP for a minute, SIGCONT -> it says 2 s
    still, and goes on from there: what had a minute left has a minute left.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        """Begin with what `now_s` says."""
        self._now_s = now_s
        self._looked_at = now_s()
        self._slept_s = 0.0

    def __call__(self) -> float:
        """Look."""
        now_s = self._now_s()
        rest_s, self._looked_at = now_s - self._looked_at, now_s
        if rest_s > ASLEEP_S:
            self._slept_s += rest_s
        return now_s - self._slept_s
