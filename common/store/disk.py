"""Append-only files of complete records, and waiting with log messages while a disk is full."""

import contextlib
import errno
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from common.errors import LongstrideError

logger = logging.getLogger(__name__)

POLL_S = 0.5  # Seconds between two attempts. The system has no event for free disk space.
LOG_EVERY_S = 30.0
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Error texts of libraries that do not pass on the system's errno.
_NO_ROOM_TEXTS = (
    "No space left on device",
    "Disk quota exceeded",
    "File too large",
    "file write failed",  # Text of torch for any failed write.
    ". unexpected pos ",  # Text of torch for a short write, in the error of another rank.
)
MAX_BUFFERS = 1_000  # Maximum number of buffers in one system call.

T = TypeVar("T")


class DiskFull(LongstrideError):
    """A wait for free disk space was aborted."""


def is_no_room(error: BaseException) -> bool:
    """Return whether a full disk or quota caused an error."""
    return any(
        (isinstance(cause, OSError) and cause.errno in _NO_ROOM)
        or any(text in str(cause) for text in _NO_ROOM_TEXTS)
        for cause in errors_behind(error)
    )


def errors_behind(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its causes, and the errors of ranks that it contains."""
    while error is not None:
        yield error
        # The error of torch.distributed.checkpoint contains the error of each rank, with its trace.
        failures: dict[int, tuple[BaseException, object]] = getattr(error, "failures", {})
        for failure, _ in failures.values():
            yield from errors_behind(failure)
        error = error.__cause__ or error.__context__


class RoomWait:
    """Logs a full disk at the first failed write, every 30 s, and at the first write that works.

    Example: wait = RoomWait(path). Call `wait.note_failure(error)` after each failed attempt and
    `wait.over()` after a successful one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._since: float | None = None
        self._log_at = 0.0

    @property
    def text(self) -> str:
        """Description of the current wait, "" without one."""
        return "" if self._since is None else f"disk: no room for {self._path}"

    def note_failure(self, error: BaseException) -> None:
        """Record a failed write. Raises: the error, unless a full disk caused it."""
        if not is_no_room(error):
            raise error
        now = time.monotonic()
        if self._since is None:
            self._since = self._log_at = now
        if now >= self._log_at:
            self._log_at = now + LOG_EVERY_S
            logger.error(
                "disk full: no room for %s (%s, %s free); the writer waits and loses nothing"
                " waited_s=%.0f",
                self._path,
                getattr(error, "strerror", None) or error,
                free_text(self._path),
                now - self._since,
            )

    def over(self) -> None:
        """Record a successful write."""
        if self._since is not None:
            took_s = time.monotonic() - self._since
            self._since = None
            logger.warning("disk has room again file=%s waited_s=%.0f", self._path, took_s)


def free_text(path: Path) -> str:
    """Return the free space of the disk of `path` as text."""
    above = next((each for each in (path, *path.parents) if each.exists()), Path("/"))
    return f"{shutil.disk_usage(above).free / 2**20:.0f} MB"


def with_room(
    write: Callable[[], T], path: Path, *, check: Callable[[], object] = lambda: None
) -> T:
    """Return the result of `write`. While the disk is full, wait and call it again.

    Args:
        write: must undo its changes if it fails.
        path: the written file, for the log.
        check: called before each further attempt; ends the wait by raising.
    """
    wait = RoomWait(path)
    while True:
        try:
            result = write()
        except (OSError, RuntimeError) as error:
            wait.note_failure(error)
        else:
            wait.over()
            return result
        check()
        time.sleep(POLL_S)


_logged_at: dict[Path, float] = {}  # Time of the last log message for each file of `if_room`.


def if_room(write: Callable[[], object], path: Path) -> bool:
    """Call `write`; return False if the disk is full, with a log message every 30 s.

    Use it for files that are rewritten soon or that the run does not need.
    """
    try:
        write()
    except OSError as error:
        if not is_no_room(error):
            raise
        now = time.monotonic()
        if now - _logged_at.get(path, -LOG_EVERY_S) >= LOG_EVERY_S:
            _logged_at[path] = now
            logger.error(
                "disk full: no room for %s (%s free); the run waits and loses nothing",
                path,
                free_text(path),
            )
        return False
    return True


class AppendFile:
    """An append-only file with one writer. A failed append leaves the file unchanged.

    Example: append([a, b]) writes both, or raises OSError and writes neither. After `sync` both
    survive a power cut. `sync` is thread-safe.
    """

    def __init__(self, path: Path) -> None:
        """Open a file for appending, and create it if it is missing."""
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.size = os.fstat(self._fd).st_size  # Size in bytes.

    def append(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Append the buffers in order. Raises: OSError: the write failed, the file is unchanged."""
        start = self.size
        try:
            if len(buffers) > MAX_BUFFERS:
                buffers = [b"".join(buffers)]
            num_bytes = sum(map(len, buffers))
            written = os.pwritev(self._fd, buffers, start)
            if written < num_bytes:
                self._write_rest(b"".join(buffers)[written:], start + written)
        except OSError:
            with contextlib.suppress(OSError):  # The next append overwrites a remaining part.
                os.ftruncate(self._fd, start)
            raise
        self.size = start + num_bytes

    def _write_rest(self, rest: bytes, offset: int) -> None:
        """Write bytes at an offset, also if the system writes them in pieces."""
        view = memoryview(rest)
        while view:
            num = os.pwrite(self._fd, view, offset)
            view = view[num:]
            offset = offset + num

    def truncate(self, size: int) -> bytes:
        """Cut the file to `size` bytes; return the removed bytes."""
        torn = os.pread(self._fd, self.size - size, size) if size < self.size else b""
        os.ftruncate(self._fd, size)
        self.size = size
        return torn

    def sync(self) -> None:
        """Wait until all appended bytes survive a power cut. Raises: OSError."""
        os.fsync(self._fd)

    def append_synced(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Append the buffers and sync them. Raises: OSError: it failed, the file is unchanged."""
        start = self.size
        self.append(buffers)
        try:
            self.sync()
        except OSError:
            self.truncate(start)
            raise

    def write_again(self, start: int, end: int) -> None:
        """Write the bytes in [start, end) once more, which a failed sync may have lost.

        The system marks pages as clean even if it failed to write them. A second sync alone would
        therefore succeed without writing them.
        """
        chunk = 1 << 20
        for offset in range(start, end, chunk):
            self._write_rest(os.pread(self._fd, min(chunk, end - offset), offset), offset)

    def close(self) -> None:
        """Close the file. Closing twice is allowed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
