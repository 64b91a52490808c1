"""A wall clock that can jump for the processes of one run, by a preloaded library.

Linux has no namespace for the wall clock, and other programs use the machine's clock. Monotonic
clocks and the timestamps of files do not jump. libfaketime 0.9.10 cannot serve here: without a
jump of the monotonic clock it makes `time.sleep` of Python 3.11 fail with EINVAL, and with one
waits for events never end.
"""

import shutil
import struct
import subprocess
from pathlib import Path

COMPILE_S = 60.0
SOURCE = Path(__file__).with_name("clock.c")


class JumpingClock:
    """The wall clock of processes that are started with `environment`.

    Example: clock = make_clock(folder); start(env=clock.environment); clock.set_ahead(3600)
    """

    def __init__(self, library: Path, ahead: Path) -> None:
        self._ahead = ahead
        self.environment = {"LD_PRELOAD": str(library), "LONGSTRIDE_CHAOS_CLOCK": str(ahead)}
        self.set_ahead(0)

    def set_ahead(self, seconds: int) -> None:
        """Set the clock this many seconds ahead of the machine's; negative: behind it."""
        # Processes have mapped the file, so it must not be truncated or replaced.
        mode = "r+b" if self._ahead.exists() else "wb"
        with self._ahead.open(mode, buffering=0) as file:
            file.write(struct.pack("=q", seconds))


def make_clock(folder: Path) -> JumpingClock | None:
    """Compile the library into a folder; return None if there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    library = folder / "clock.so"
    command = (compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl")
    subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_S)
    return JumpingClock(library, folder / "clock.ahead")
