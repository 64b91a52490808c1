"""Limits the size of a journal: compresses files that no restart needs, prunes the oldest."""

import gzip
import json
import logging
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from common.config.journal import JournalSection
from common.errors import WireError
from common.store.disk import is_no_room
from common.store.run_dir import sync_folder, write_atomically
from learner.journal.journal import (
    PACKED_SUFFIX,
    PRUNED,
    JournalPosition,
    Pruned,
    journal_file_path,
    journal_files,
    load_pruned,
)

logger = logging.getLogger(__name__)

STOP_S = 5.0
DAY_S = 86_400.0
GB = 10**9
PACK_LEVEL = 1  # Level of zlib. Higher levels hardly reduce the size of token columns.
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionLimits:
    """Limits on the files that a restart does not need. None: no limit."""

    keep_bytes: float | None = None
    keep_s: float | None = None

    @classmethod
    def of(cls, cfg: JournalSection) -> "RetentionLimits":
        """Return the limits of a run."""
        return cls(keep_bytes=cfg.keep_gb * GB or None, keep_s=cfg.keep_days * DAY_S or None)


def prune_old(folder: Path, limits: RetentionLimits, *, before: int) -> Pruned:
    """Remove the oldest files below `before` that exceed a limit; return the new `Pruned`."""
    left = sum(path.stat().st_size for path in journal_files(folder).values())
    now = time.time()

    def may_remove(_: int, path: Path) -> bool:
        """Return whether the oldest remaining file exceeds a limit."""
        nonlocal left
        status = path.stat()
        is_over = limits.keep_bytes is not None and left > limits.keep_bytes
        is_old = limits.keep_s is not None and now - status.st_mtime > limits.keep_s
        left -= status.st_size
        return is_over or is_old

    earlier = load_pruned(folder)
    pruned = prune(folder, before=before, may_remove=may_remove)
    for path in folder.glob("*.torn"):
        if int(path.name.partition("-")[0]) < pruned.before:
            path.unlink(missing_ok=True)
    if pruned != earlier:
        num_bytes = pruned.num_bytes - earlier.num_bytes
        logger.info("%s mb=%.1f", pruned.text(folder), num_bytes / 1e6)
    return pruned


class Upkeep(threading.Thread):
    """The thread that limits the size of a journal, at idle priority.

    consumes:   positions from `settled`
    waits for:  the disk, and an idle CPU core
    unblocked by: `stop`, which leaves a file in compression unchanged
    """

    def __init__(self, folder: Path, cfg: JournalSection) -> None:
        super().__init__(name="journal-upkeep", daemon=True)
        self._folder = folder
        self._cfg = cfg
        self._changed = threading.Condition()
        self._settled: JournalPosition | None = None  # The newest position, until it is processed.
        self._is_stopping = False

    def settled(self, position: JournalPosition) -> None:
        """Report that no restart reads records before a position."""
        with self._changed:
            self._settled = position
            self._changed.notify()

    def stop(self) -> None:
        """End the thread."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        if self.is_alive():
            self.join(timeout=STOP_S)

    def run(self) -> None:
        """Process positions until stopped. An error is logged; the next checkpoint retries."""
        _idle_priority()
        while (position := self._next_position()) is not None:
            try:
                prune_old(self._folder, RetentionLimits.of(self._cfg), before=position.file)
                if self._cfg.compress:
                    self._pack_below(position.file)
            except (OSError, WireError) as error:
                text = "disk full" if is_no_room(error) else "failed"
                logger.error("%s: cannot compress or prune the journal: %s", text, error)
            except _Stopped:
                return

    def _pack_below(self, end: int) -> None:
        """Compress the finished files below a number."""
        for number, path in journal_files(self._folder).items():
            if number < end and path.suffix != PACKED_SUFFIX:
                started = time.monotonic()
                before = path.stat().st_size
                freed = pack(self._folder, number, check=self._check_not_stopped)
                took_s = time.monotonic() - started
                logger.info(
                    "compressed file=%d mb=%.1f to=%.1f took_s=%.1f",
                    number,
                    before / 1e6,
                    (before - freed) / 1e6,
                    took_s,
                )

    def _check_not_stopped(self) -> None:
        if self._is_stopping:
            raise _Stopped

    def _next_position(self) -> JournalPosition | None:
        """Return the newest reported position; None: the thread must stop. Waits."""
        with self._changed:
            self._changed.wait_for(lambda: self._settled is not None or self._is_stopping)
            position = self._settled
            self._settled = None
            return None if self._is_stopping else position


class _Stopped(Exception):
    """Raised to end the thread during compression."""


def _idle_priority() -> None:
    """Set the idle scheduling priority for the calling thread."""
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except (OSError, AttributeError):  # The system does not support it. The thread works without.
        return


def prune(folder: Path, *, before: int, may_remove: Callable[[int, Path], bool]) -> Pruned:
    """Remove the oldest files below `before`, up to the first for which `may_remove` is False.

    The removal is recorded first, so that no reader takes the rest for the whole journal.
    """
    pruned = load_pruned(folder)
    going = list[Path]()
    for number, path in journal_files(folder).items():
        if number >= before or not may_remove(number, path):
            break
        going.append(path)
        pruned = Pruned(
            before=number + 1,
            at=time.strftime("%Y-%m-%d %H:%M:%S"),
            num_bytes=pruned.num_bytes + path.stat().st_size,
        )
    if going:
        write_atomically(folder / PRUNED, json.dumps(asdict(pruned)) + "\n", is_durable=True)
        for path in going:
            path.unlink(missing_ok=True)
    return pruned


def pack(folder: Path, number: int, *, check: Callable[[], object] = lambda: None) -> int:
    """Replace a finished file by a compressed file; return the number of freed bytes.

    Readers find one of the two files at any time. The compressed file is read back and compared
    before the file is removed.

    Args:
        check: called every megabyte; ends the compression by raising.

    Raises: OSError: the disk is full. WireError: the compressed file differs. After any error the
        file is unchanged.
    """
    path = journal_file_path(folder, number)
    packed = path.with_name(path.name + PACKED_SUFFIX)
    partial = packed.with_name(f".{packed.name}.partial")
    try:
        with path.open("rb") as plain, partial.open("wb") as raw:
            with gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=PACK_LEVEL, mtime=0) as out:
                crc = _copy(plain.read, out.write, check)
            raw.flush()
            os.fsync(raw.fileno())
        with gzip.open(partial, "rb") as back:
            if _copy(back.read, lambda _: None, check) != crc:
                raise WireError(f"{partial}: its content differs from the written content")
        shutil.copystat(path, partial)  # Keeps the age, on which pruning depends.
        partial.replace(packed)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(folder)
    freed = path.stat().st_size - packed.stat().st_size
    path.unlink()
    return freed


def _copy(
    read: Callable[[int], bytes], write: Callable[[bytes], object], check: Callable[[], object]
) -> int:
    """Copy bytes in chunks; return their checksum. `check` may end the copy by an exception."""
    crc = 0
    while chunk := read(_CHUNK_BYTES):
        check()
        write(chunk)
        crc = zlib.crc32(chunk, crc)
    return crc
