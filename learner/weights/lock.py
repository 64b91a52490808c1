"""The lock between transfers, which read live weights, and the optimizer, which changes them."""

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

STOP_POLL_S = 0.5  # Seconds between two checks whether the learner is stopping.


class WeightsLock:
    """A readers-writer lock: transfers read live weights between the updates of two steps.

    Consumes: nothing. The trainer closes the lock before the first update of a step; the
        publisher opens it with the next version.
    Waits for: in `close`, transfers that read, at most `timeout_s`. After that they must abort,
        which takes at most one polling interval.

    Example: open() -> version 3 may be read. A transfer calls enter(). The next step's forward and
    backward pass run during the transfer; its close() waits. leave() -> close() returns, weights
    change. enter() -> False: the weights are between two versions. open() -> version 4 may be read.
    """

    def __init__(
        self, *, timeout_s: float, is_stopping: Callable[[], bool] = lambda: False
    ) -> None:
        """Start closed, without readers. Once `is_stopping` returns True, `close` waits no more."""
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._is_open = False
        self._num_inside = 0
        self._writer_waiting = False
        self._readers_must_abort = False
        self._waited_s = 0.0
        self._is_stopping = is_stopping

    def open(self) -> None:
        """Allow readers: the weights are a complete version and stay unchanged until `close`."""
        with self._changed:
            self._is_open = True

    def enter(self) -> bool:
        """Start to read; False if the weights cannot be read now."""
        with self._changed:
            if not self.is_open:
                return False
            self._num_inside += 1
            return True

    def leave(self) -> None:
        """End the read that `enter` started."""
        with self._changed:
            self._num_inside -= 1
            self._changed.notify_all()

    @property
    def is_open(self) -> bool:
        """True if a version can be read."""
        return self._is_open and not self._writer_waiting

    @property
    def writer_waiting(self) -> bool:
        """True if the trainer waits in `close`."""
        return self._writer_waiting

    @property
    def readers_must_abort(self) -> bool:
        """True if readers must abort because `close` has waited too long."""
        return self._readers_must_abort

    def close(self) -> None:
        """Wait until there are no readers, and admit no new ones. For the trainer's thread."""
        started = time.monotonic()
        with self._changed:
            self._writer_waiting = True
            while self._num_inside:
                is_late = time.monotonic() - started > self._timeout_s
                if (is_late or self._is_stopping()) and not self._readers_must_abort:
                    logger.warning("aborting the weight transfer: the trainer needs the weights")
                    self._readers_must_abort = True
                self._changed.wait(STOP_POLL_S)
            self._is_open = self._writer_waiting = self._readers_must_abort = False
            self._waited_s += time.monotonic() - started

    def drain_waited_s(self) -> float:
        """Return the seconds that `close` waited since the last call."""
        with self._changed:
            waited_s = self._waited_s
            self._waited_s = 0.0
        return waited_s


class WeightsReadLock:
    """A transfer's read lock on the weights of a version; live weights may change after `end`."""

    def __init__(
        self,
        weights_lock: WeightsLock,
        *,
        is_live: bool,
        is_held: bool,
        is_optional: bool,
        is_superseded: Callable[[], bool] | None = None,
    ) -> None:
        """Prepare a read lock; `begin` acquires it.

        Args:
            is_live: the weights are live, so the lock guards them.
            is_held: the lock has been entered already.
            is_optional: the transfer stops waiting for engines as soon as the trainer needs the
                weights, or a newer version exists.
            is_superseded: returns True if a newer version must be sent; None: never.
        """
        self._weights_lock = weights_lock
        self._is_live = is_live
        self._is_held = is_held
        self._is_optional = is_optional
        self.is_superseded = is_superseded or (lambda: False)
        self.is_lost = False

    def begin(self) -> bool:
        """Acquire the lock; False if the weights are no longer that version."""
        if self._is_live and not self._is_held:
            self._is_held = self._weights_lock.enter()
            self.is_lost = not self._is_held
        return not self.is_lost

    def end(self) -> None:
        """Release the lock."""
        if self._is_held:
            self._is_held = False
            self._weights_lock.leave()

    @property
    def must_end(self) -> bool:
        """True if the transfer must abort because `close` has waited too long."""
        return self._is_held and self._weights_lock.readers_must_abort

    @property
    def must_not_wait(self) -> bool:
        """True if the transfer must stop waiting for engines before the first bucket."""
        is_unwanted = self._is_optional and (
            self._weights_lock.writer_waiting or self.is_superseded()
        )
        return self.must_end or is_unwanted
