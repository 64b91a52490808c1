"""A clock that excludes the time in which its process was suspended."""

import time
from collections.abc import Callable

ASLEEP_S = 3.0  # A longer gap between two readings, due every second, is a suspension.


class AwakeClock:
    """Monotonic seconds without the time in which this process was suspended.

    A suspension is detected as a gap between two readings. Read the clock at least once a second.

    Example: readings at 1 s and 2 s, then SIGSTOP for a minute and SIGCONT. The next reading is
    still 2 s, so a deadline that was a minute away is still a minute away.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        """Start the clock at the current value of `now_s`."""
        self._now_s = now_s
        self._read_at = now_s()
        self._slept_s = 0.0

    def __call__(self) -> float:
        """Return the seconds without suspensions."""
        now_s = self._now_s()
        rest_s = now_s - self._read_at
        self._read_at = now_s
        if rest_s > ASLEEP_S:
            self._slept_s += rest_s
        return now_s - self._slept_s
