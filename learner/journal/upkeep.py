"""Limits the size of a journal: compresses files that no restart needs, prunes the oldest."""

import logging
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from common.config.journal import JournalSection
from common.errors import WireError
from common.store.disk import is_no_room
from learner.journal.files import (
    PACKED_SUFFIX,
    JournalPosition,
    Pruned,
    journal_files,
    load_pruned,
    pack,
    prune,
)

logger = logging.getLogger(__name__)

STOP_S = 5.0
DAY_S = 86_400.0
GB = 10**9


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
