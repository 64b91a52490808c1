"""A wall clock that can jump for the processes of one run, by libfaketime.

Linux has no namespace for the wall clock, and other programs use the machine's clock. Monotonic
clocks and the timestamps of files do not jump.
"""

from pathlib import Path

from common.store.run_dir import write_atomically

# The library of Debian's package `libfaketime`, in the variant for several threads.
LIBRARY = "lib/*/faketime/libfaketimeMT.so.1"
CACHE_S = 1  # Seconds until a process reads a new time.


class JumpingClock:
    """The wall clock of processes that are started with `environment`.

    Example: clock = make_clock(folder); start(env=clock.environment); clock.set_ahead(3600)
    """

    def __init__(self, library: Path, ahead: Path) -> None:
        self._ahead = ahead
        self.environment = {
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(ahead),
            "FAKETIME_CACHE_DURATION": str(CACHE_S),
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "NO_FAKE_STAT": "1",
        }
        self.set_ahead(0)

    def set_ahead(self, seconds: int) -> None:
        """Set the clock this many seconds ahead of the machine's; negative: behind it."""
        write_atomically(self._ahead, f"{seconds:+d}")


def make_clock(folder: Path, *, root: Path = Path("/usr")) -> JumpingClock | None:
    """Return a clock with its state in a folder; None if libfaketime is not installed."""
    libraries = sorted(root.glob(LIBRARY))
    return JumpingClock(libraries[0], folder / "clock.ahead") if libraries else None
