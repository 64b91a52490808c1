"""Files that grow by whole records, and what is done while a disk is full: wait, and say so."""

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

POLL_S = 0.5  # between two tries; no system tells when a disk has room again
SAY_EVERY_S = 30.0
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What libraries say that do not hand on the number of an error of the system.
_NO_ROOM_TEXTS = (
    "No space left on device",
    "Disk quota exceeded",
    "File too large",
    "file write failed",  # torch, whatever the reason
    ". unexpected pos ",  # torch, of a short write, in the words of another rank
)
MAX_BUFFERS = 1_000  # of one system call

T = TypeVar("T")


class DiskFull(LongstrideError):
    """A wait for room on a disk was ended from outside."""


def is_no_room(error: BaseException) -> bool:
    """Return whether a disk or quota that is full lies behind an error."""
    return any(
        (isinstance(each, OSError) and each.errno in _NO_ROOM)
        or any(text in str(each) for text in _NO_ROOM_TEXTS)
        for each in _chain(error)
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        # torch.distributed.checkpoint's error holds those of the ranks, each with its trace.
        failures: dict[int, tuple[BaseException, object]] = getattr(error, "failures", {})
        for failure, _ in failures.values():
            yield from _chain(failure)
        error = error.__cause__ or error.__context__


class RoomWait:
    """Says that a disk is full when that is first met, every 30 s, and when it is over.

    Example: wait = RoomWait(path); `wait.met(error)` per failed try, `wait.over()` once it worked.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._since: float | None = None
        self._say_at = 0.0

    @property
    def text(self) -> str:
        """What is waited for, "" if nothing is."""
        return "" if self._since is None else f"disk: no room for {self._path}"

    def met(self, error: BaseException) -> None:
        """Note that a write has failed. Raises: the error, if it is not for want of room."""
        if not is_no_room(error):
            raise error
        now = time.monotonic()
        if self._since is None:
            self._since = self._say_at = now
        if now >= self._say_at:
            self._say_at = now + SAY_EVERY_S
            logger.error(
                "disk full: no room for %s (%s, %s free); waiting for room, nothing is lost"
                " waited_s=%.0f",
                *(self._path, getattr(error, "strerror", None) or error, free_text(self._path)),
                now - self._since,
            )

    def over(self) -> None:
        """Note that a write has worked."""
        if self._since is not None:
            took_s, self._since = time.monotonic() - self._since, None
            logger.warning("disk has room again file=%s waited_s=%.0f", self._path, took_s)


def free_text(path: Path) -> str:
    """Return how much is free where a file lies, in words."""
    above = next((each for each in (path, *path.parents) if each.exists()), Path("/"))
    return f"{shutil.disk_usage(above).free / 2**20:.0f} MB"


def with_room(
    write: Callable[[], T], path: Path, *, check: Callable[[], object] = lambda: None
) -> T:
    """Return what `write` returns; while the disk is full, wait and call it again.

    Args:
        write: leaves things as they were if it fails.
        path: what it writes, for the log.
        check: called before each further try; ends the wait by raising.
    """
    wait = RoomWait(path)
    while True:
        try:
            result = write()
        except (OSError, RuntimeError) as error:
            wait.met(error)
        else:
            wait.over()
            return result
        check()
        time.sleep(POLL_S)


_said: dict[Path, float] = {}  # of files for people, when it was last said


def if_room(write: Callable[[], object], path: Path) -> bool:
    """Call `write`; return False if the disk is full, which is said every 30 s.

    For what is written anew soon, or is for people only.
    """
    try:
        write()
    except OSError as error:
        if not is_no_room(error):
            raise
        now = time.monotonic()
        if now - _said.get(path, -SAY_EVERY_S) >= SAY_EVERY_S:
            _said[path] = now
            logger.error(
                "disk full: no room for %s (%s free); the run waits for room, nothing is lost",
                *(path, free_text(path)),
            )
        return False
    return True


class AppendFile:
    """A file that grows by whole records: after an error it is as it was. For one writer.

    Example: append([a, b]) -> both are there, or OSError and neither is; `sync` -> a power cut
    leaves them. `sync` is for any thread.
    """

    def __init__(self, path: Path) -> None:
        """Open a file at its end, creating it when it is new."""
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.size = os.fstat(self._fd).st_size  # bytes

    def append(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Write the buffers one after the other. Raises: OSError: the file is as before."""
        start = self.size
        try:
            if len(buffers) > MAX_BUFFERS:
                buffers = [b"".join(buffers)]
            num_bytes = sum(map(len, buffers))
            written = os.pwritev(self._fd, buffers, start)
            if written < num_bytes:
                self._write_rest(b"".join(buffers)[written:], start + written)
        except OSError:
            with contextlib.suppress(OSError):  # the next append writes over it
                os.ftruncate(self._fd, start)
            raise
        self.size = start + num_bytes

    def _write_rest(self, rest: bytes, offset: int) -> None:
        view = memoryview(rest)
        while view:
            num = os.pwrite(self._fd, view, offset)
            view, offset = view[num:], offset + num

    def truncate(self, size: int) -> bytes:
        """Cut the file to `size` bytes; return what was cut off."""
        torn = os.pread(self._fd, self.size - size, size) if size < self.size else b""
        os.ftruncate(self._fd, size)
        self.size = size
        return torn

    def sync(self) -> None:
        """Return when all that was appended survives a power cut. Raises: OSError."""
        os.fsync(self._fd)

    def write_again(self, start: int, end: int) -> None:
        """Write what lies in [start, end) once more: after a failed sync it may be nowhere else.

        The system holds pages that it could not write for clean, so that a second sync of the same
        pages would promise what is not so.
        """
        chunk = 1 << 20
        for offset in range(start, end, chunk):
            self._write_rest(os.pread(self._fd, min(chunk, end - offset), offset), offset)

    def close(self) -> None:
        """Close it; closing twice is allowed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
