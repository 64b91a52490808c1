"""Syncs the journal in its own thread, so that the intake continues while the disk works."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from common.wire.messages import Ack, Trajectory
from learner.journal.journal import JournalPosition


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingCommit:
    """Appended trajectories that may not be on disk yet, and the answers that wait for the sync."""

    answers: list[tuple[bytes, Ack]]  # (ROUTER identity, answer to that sender).
    accepted: list[tuple[Trajectory, JournalPosition]]
    end: JournalPosition  # End of the journal after the batch.


class GroupCommit(threading.Thread):
    """One sync for all batches submitted during the last sync; batches complete in order.

    consumes:   `submit`, from the thread that appends
    waits for:  a batch, or the disk
    unblocked by: `submit`, `stop`

    Example: submit(a) -> a sync begins. submit(b) and submit(c) are called during it. When it ends,
    take_done() is [a], and one sync for b and c begins. A failed sync ends the thread; then
    take_done() raises.
    """

    def __init__(self, sync: Callable[[], None], *, on_done: Callable[[], None]) -> None:
        """Create the thread without starting it; the thread calls `on_done` after every sync."""
        super().__init__(name="journal-sync", daemon=True)
        self._sync = sync
        self._on_done = on_done
        self._changed = threading.Condition()
        self._waiting: list[PendingCommit] = []
        self._done: list[PendingCommit] = []
        self._is_stopping = False
        self._error: OSError | None = None

    def submit(self, batch: PendingCommit) -> None:
        """Request a sync of all appended records; the batch is the last of them."""
        with self._changed:
            self._waiting.append(batch)
            self._changed.notify()

    def take_done(self) -> list[PendingCommit]:
        """Return the batches that are now on disk. Raises: OSError: a sync failed."""
        with self._changed:
            if self._error is not None:
                raise self._error
            done = self._done
            self._done = []
        return done

    def stop(self, *, timeout_s: float) -> None:
        """Sync the submitted batches and end the thread, within `timeout_s`."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        self.join(timeout=timeout_s)

    def run(self) -> None:
        """Sync until stopped."""
        while batches := self._next():
            try:
                self._sync()
            except OSError as error:
                with self._changed:
                    self._error = error
                self._on_done()
                return
            with self._changed:
                self._done += batches
            self._on_done()

    def _next(self) -> list[PendingCommit]:
        """Wait for batches; return none if the thread is stopping and all are done."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_stopping)
            batches = self._waiting
            self._waiting = []
            return batches
