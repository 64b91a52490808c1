"""Virtual time: a queue of scheduled events in a deterministic order."""

import heapq
from collections.abc import Callable
from typing import Any

START_S = 1000.0  # A non-zero start, as real clocks have.


class EventQueue:
    """The clock of a simulation and the heap of its events. Equal times are in order of entry."""

    def __init__(self) -> None:
        self.clock_s = START_S
        self._events: list[tuple[float, int, Callable[..., Any], tuple[Any, ...]]] = []
        self._num_entered = 0

    def __call__(self) -> float:
        """Return the virtual time, as the scheduler's clock."""
        return self.clock_s

    @property
    def now_s(self) -> float:
        return self.clock_s - START_S

    def at(self, after_s: float, action: Callable[..., Any], *args: Any) -> None:
        """Schedule `action(*args)` after `after_s` seconds."""
        self._num_entered += 1
        heapq.heappush(self._events, (self.clock_s + after_s, self._num_entered, action, args))

    def run_until(self, end_s: float, *, is_over: Callable[[], bool]) -> None:
        """Execute the events up to `end_s`, or until `is_over` returns True after an event."""
        events = self._events
        while events and events[0][0] - START_S <= end_s:
            self.clock_s, _, action, args = heapq.heappop(events)
            action(*args)
            if is_over():
                return
        if events:
            self.clock_s = START_S + end_s
