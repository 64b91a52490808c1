"""How much memory a run takes: the peak over time of all its processes together."""

import os
import time

import psutil

SAMPLE_S = 5.0


class MemoryWatch:
    """Samples this process and its descendants; call `sample` as often as you like.

    Counts proportional set size where the system tells it (a page that three processes share counts
    a third in each), else resident size, which counts it three times.
    """

    def __init__(self) -> None:
        self._process = psutil.Process(os.getpid())
        self._next = 0.0
        self.peak_bytes = 0

    def sample(self) -> None:
        """Take a sample if the last one is old enough."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + SAMPLE_S
        members = [self._process, *self._process.children(recursive=True)]
        self.peak_bytes = max(self.peak_bytes, sum(_size_bytes(member) for member in members))


def _size_bytes(process: psutil.Process) -> int:
    """Return the size of one process, 0 if it has just ended."""
    try:
        full = process.memory_full_info()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0
    return int(getattr(full, "pss", 0) or full.rss)
