"""Publishing: every version goes to every engine that listens. One thread owns the weight plane."""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable

from common.errors import LongstrideError, WeightSyncError
from common.wire.sockets import Router
from learner.weights.canary import Canary
from learner.weights.membership import Membership
from learner.weights.snapshot import PublishedWeights
from learner.weights.transfer import STOP_S, WAIT_S, Transfers

logger = logging.getLogger(__name__)


class Publisher(threading.Thread):
    """The learner's side of the weight plane.

    Consumes: versions from `publish`; joins, answers and canary scores from the engines.
    Waits for: every present member, until it has answered, is known to be gone, or the deadline.
    Unblocked by: those messages, `mark_silent`, `stop`.

    Example: publish(v3) returns when v3 is at its engines. An engine that dies meanwhile costs
    that one call the time until it is known (`mark_silent`), then it is no member any more; with
    no member left, publish returns at once, and whoever joins later is given the newest version.
    """

    def __init__(self, router: Router, *, host: str, timeout_s: float, max_canary_delta: float):
        """Make one that listens at `router`; its rendezvous store is at `host`.

        Args:
            timeout_s: most seconds of each part of a transfer, when nobody is known to be gone.
            max_canary_delta: mean |difference| in nats that is no alarm.
        """
        super().__init__(name="publisher", daemon=True)
        self._router = router
        self.port = router.port
        self._timeout_s = timeout_s
        self._members = Membership()
        self._canary = Canary(max_delta=max_canary_delta)
        self._stop_requested = threading.Event()
        self._transfers = Transfers(
            router,
            self._members,
            self._canary,
            host=host,
            timeout_s=timeout_s,
            stop_requested=self._stop_requested,
        )
        self._changed = threading.Condition()
        self._wanted: PublishedWeights | None = None
        self._error: BaseException | None = None
        self._metrics: dict[str, float] = {}

    # --- any thread -------------------------------------------------------------------------

    def publish(
        self, weights: PublishedWeights, *, is_stopping: Callable[[], bool] = lambda: False
    ) -> bool:
        """Send a version to all members; True when it is there, False if told to stop first.

        Raises: LongstrideError: the publisher's thread failed, or did not finish in bounded time.
        """
        started = time.monotonic()
        deadline = started + 3 * self._timeout_s
        with self._changed:
            self._wanted = weights
            self._router.wake()
            while self._wanted is not None:
                if self._error is not None:
                    raise LongstrideError(f"publisher failed: {self._error}") from self._error
                if time.monotonic() > deadline:
                    names = sorted(member.actor for member in self._members.present())
                    raise WeightSyncError(
                        f"version {weights.version} not published to {names} "
                        f"within {3 * self._timeout_s:g}s"
                    )
                if is_stopping():
                    return False
                self._changed.wait(WAIT_S)
            self._metrics["publish/total_s"] = time.monotonic() - started
        return True

    def mark_silent(self, incarnations: Iterable[str]) -> None:
        """Wait for none of these actors, and for all others: the scheduler's present word."""
        if self._members.mark_silent(incarnations):
            self._router.wake()

    @property
    def num_canary_alarms(self) -> int:
        """Versions in a row on which the worst engine and the trainer disagreed."""
        return self._canary.num_alarms

    def drain_metrics(self) -> dict[str, float]:
        """Return what the transfers and canaries since the last call measured."""
        with self._changed:
            metrics, self._metrics = self._metrics, {}
        metrics["weights/members"] = float(len(self._members.present()))
        return metrics | self._transfers.drain_metrics() | self._canary.drain_metrics()

    def stop(self) -> None:
        """End the thread; one that is blocked in a broadcast ends with the process."""
        self._stop_requested.set()
        self._router.wake()
        self.join(timeout=STOP_S)

    # --- the thread -------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until stopped; a failure is kept and raised in the main thread."""
        transfers = self._transfers
        try:
            while not self._stop_requested.is_set():
                transfers.receive(WAIT_S)
                if self._wanted is not None:
                    self._send_wanted(self._wanted)
                elif transfers.current is not None:
                    transfers.bring(transfers.current, self._members.take_newcomers())
        finally:
            with self._changed:
                self._error = sys.exception()
                self._changed.notify_all()
            if self._error is not None:
                logger.error("publisher failed", exc_info=self._error)
            transfers.close()

    def _send_wanted(self, weights: PublishedWeights) -> None:
        self._transfers.current = weights
        self._canary.expect(weights)
        self._members.take_newcomers()
        self._transfers.bring(weights, self._members.present())
        with self._changed:
            self._wanted = None
            self._changed.notify_all()
