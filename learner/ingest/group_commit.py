"""Syncs the journal in a thread of its own, so that the intake reads on while the disk works."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from common.store.journal import JournalPosition
from common.wire.messages import Ack, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Trajectories that are appended and not yet known to be on disk, and who waits for that."""

    answers: list[tuple[bytes, Ack]]  # ROUTER identity, what it is told
    accepted: list[tuple[Trajectory, JournalPosition]]
    end: JournalPosition  # of the journal behind them


class GroupCommit(threading.Thread):
    """One sync for all batches that came during the last one; batches are done in their order.

    consumes:   `submit`, from the thread that appends
    waits for:  a batch, or the disk
    unblocked by: `submit`, `stop`

    Example: submit(a) -> a sync begins. submit(b), submit(c) meanwhile. It ends: take_done() is
    [a], and one sync for b and c begins. A sync that fails ends the thread; take_done() raises.
    """

    def __init__(self, sync: Callable[[], None], *, on_done: Callable[[], None]) -> None:
        """Make one that is not started; `on_done` is called after every sync, from its thread."""
        super().__init__(name="journal-sync", daemon=True)
        self._sync = sync
        self._on_done = on_done
        self._changed = threading.Condition()
        self._waiting: list[Batch] = []
        self._done: list[Batch] = []
        self._is_stopping = False
        self._error: OSError | None = None

    def submit(self, batch: Batch) -> None:
        """Have what was appended so far synced, of which this is the last."""
        with self._changed:
            self._waiting.append(batch)
            self._changed.notify()

    def take_done(self) -> list[Batch]:
        """Return the batches that have come to be on disk. Raises: OSError: a sync failed."""
        with self._changed:
            if self._error is not None:
                raise self._error
            done, self._done = self._done, []
        return done

    def stop(self, *, timeout_s: float) -> None:
        """Sync what was submitted and end; the disk gets `timeout_s`."""
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

    def _next(self) -> list[Batch]:
        """Wait for batches; none once there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_stopping)
            batches, self._waiting = self._waiting, []
            return batches
