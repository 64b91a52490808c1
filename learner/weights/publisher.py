"""Publishing: every version goes to every engine that listens; a dead one is left behind.

One thread owns the weight plane. A transfer is: offer -> each engine freezes and says ready ->
broadcast -> each engine reports what it loaded. Whoever leaves, falls silent or misses a deadline
is removed; the others are offered the version again at once, in a group without it.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from common.errors import LongstrideError, WeightSyncError
from common.wire.collective import backend_for, device_id, open_store
from common.wire.messages import Rejected
from common.wire.sockets import Router
from common.wire.weight_group import TransferCancelled, WeightGroup, cancel
from common.wire.weight_messages import (
    CanaryScores,
    WeightsJoin,
    WeightsLeave,
    WeightsLoaded,
    WeightsOffer,
    WeightsReady,
)
from learner.weights.canary import Canary
from learner.weights.membership import Member, Membership
from learner.weights.snapshot import PublishedWeights

logger = logging.getLogger(__name__)

WAIT_S = 0.5  # between looks at deadlines; whatever happens wakes the thread at once
STOP_S = 2.0


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
        """Make one that listens at `router`.

        Args:
            host: where the engines find the rendezvous store.
            timeout_s: most seconds of each part of a transfer, when nobody is known to be gone.
            max_canary_delta: mean |difference| in nats that is no alarm.
        """
        super().__init__(name="publisher", daemon=True)
        self._router = router
        self.port = router.port
        self._host = host
        self._timeout_s = timeout_s
        self._store = open_store(host, 0, is_server=True, timeout_s=timeout_s)
        self._group = WeightGroup()
        self._group_members: list[Member] = []
        self._epoch = 0
        self._members = Membership()
        self._answers: dict[tuple[type, Member], Any] = {}  # of this epoch and version
        self._canary = Canary(max_delta=max_canary_delta)
        self._changed = threading.Condition()
        self._wanted: PublishedWeights | None = None
        self._current: PublishedWeights | None = None
        self._stop_requested = threading.Event()
        self._error: BaseException | None = None
        self._metrics: dict[str, float] = {}

    # --- any thread -------------------------------------------------------------------------

    def publish(
        self, weights: PublishedWeights, *, is_stopping: Callable[[], bool] = lambda: False
    ) -> bool:
        """Send a version to all members; True when it is there, False if told to stop first.

        Raises:
            LongstrideError: the publisher's thread failed, or did not finish in bounded time.
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
        return metrics | self._canary.drain_metrics()

    def stop(self) -> None:
        """End the thread and close its sockets and groups.

        A thread that is blocked in a broadcast ends with the process.
        """
        self._stop_requested.set()
        self._router.wake()
        self.join(timeout=STOP_S)

    # --- the thread -------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until stopped; a failure is kept and raised in the main thread."""
        try:
            while not self._stop_requested.is_set():
                self._receive(WAIT_S)
                if self._wanted is not None:
                    self._send_wanted(self._wanted)
                elif self._current is not None:
                    self._transfer(self._current, self._members.take_newcomers())
        finally:
            with self._changed:
                self._error = sys.exception()
                self._changed.notify_all()
            if self._error is not None:
                logger.error("publisher failed", exc_info=self._error)
            self._group.leave()
            self._router.close()
            del self._store  # whoever waits in it fails now
            self._group.join(timeout_s=STOP_S / 2)

    def _send_wanted(self, weights: PublishedWeights) -> None:
        self._current = weights
        self._canary.expect(weights)
        self._members.take_newcomers()
        self._transfer(weights, self._members.present())
        with self._changed:
            self._wanted = None
            self._changed.notify_all()

    def _receive(self, timeout_s: float) -> None:
        """Take in what comes within `timeout_s`, or what woke the thread."""
        for received in self._router.receive_all(timeout_s=timeout_s):
            message = received.message
            match message:
                case WeightsJoin():
                    version = self._current.version if self._current is not None else -1
                    self._members.join(received.sender, message, current_version=version)
                case WeightsLeave():
                    member = self._members.find(message.actor, message.incarnation)
                    if member is not None:
                        self._members.remove(member, reason="it left")
                case CanaryScores():
                    self._canary.compare(message)
                case WeightsReady() | WeightsLoaded():
                    self._note_answer(message)
                case _:
                    reason = f"{type(message).__name__} is not for weights"
                    self._router.send(received.sender, Rejected(reason=reason))
        self._members.forget_silent()

    def _note_answer(self, answer: WeightsReady | WeightsLoaded) -> None:
        member = self._members.find(answer.actor, answer.incarnation)
        is_asked = self._current is not None and answer.version == self._current.version
        if member is None or not is_asked or answer.group_epoch != self._epoch:
            return
        self._answers[type(answer), member] = answer
        if isinstance(answer, WeightsLoaded) and answer.is_ok:
            with self._changed:
                pause_s = max(self._metrics.get("publish/pause_s", 0.0), answer.pause_s)
                self._metrics["publish/pause_s"] = pause_s

    # --- one version to some members ----------------------------------------------------------

    def _transfer(self, weights: PublishedWeights, members: list[Member]) -> None:
        """Bring one version to the given members; remove those that fail, go on with the rest.

        A broken transfer does not say who broke it. The dead cannot be reached at the next offer;
        if all can, one transfer each tells.
        """
        num_broken = 0
        while members and not self._stop_requested.is_set():
            try:
                served = self._transfer_once(weights, members)
            except WeightSyncError as error:
                logger.error("transfer failed version=%d reason=%s", weights.version, error)
                cancel(self._store, self._epoch)
                self._leave_group()
                present = [member for member in members if self._members.has(member)]
                is_broken = present == members
                num_broken += is_broken
                members = present
                if is_broken and num_broken > 1:
                    self._transfer_one_by_one(weights, members)
                    return
                continue
            self._settle(weights, members, served)
            return

    def _transfer_one_by_one(self, weights: PublishedWeights, members: list[Member]) -> None:
        for member in members:
            try:
                served = self._transfer_once(weights, [member])
            except WeightSyncError as error:
                logger.error("transfer failed actor=%s reason=%s", member.actor, error)
                cancel(self._store, self._epoch)
                served = []
            self._settle(weights, [member], served)

    def _settle(
        self, weights: PublishedWeights, members: list[Member], served: list[Member]
    ) -> None:
        """Remove those that were not served, but for those that have asked again since."""
        self._members.note_served(served)
        failed = [member for member in members if member not in served]
        for member in failed:
            if not self._members.has_asked(member):
                self._members.remove(member, reason=f"version {weights.version} is not loaded")
        if failed:
            self._leave_group()

    def _transfer_once(self, weights: PublishedWeights, members: list[Member]) -> list[Member]:
        """Offer, wait for all to be ready, broadcast, wait for all to have loaded.

        Returns:
            The members that hold the version now.

        Raises:
            WeightSyncError: not all were ready, or the broadcast failed; nobody can tell who has
                the version.
        """
        if members != self._group_members:
            self._leave_group()
            self._epoch += 1
        self._answers = {}
        offer = self._offer(weights, members)
        for rank, member in enumerate(members, start=1):
            if not self._router.send(member.sender, replace(offer, rank=rank)):
                self._members.remove(member, reason="unreachable")
        self._collect(members, WeightsReady)
        if not self._has_broken(members):  # else the others had no time to answer
            for member in members:
                if (WeightsReady, member) not in self._answers:
                    self._members.remove(member, reason="not ready in time")
        if self._has_broken(members):
            raise TransferCancelled(f"not all are ready epoch={self._epoch}")
        buffer = weights.buffer if offer.backend == "nccl" else weights.buffer.cpu()
        self._group.broadcast(buffer, offer, is_cancelled=lambda: self._is_cancelled(members))
        self._group_members = members
        self._collect(members, WeightsLoaded)
        answers = {member: self._answers.get((WeightsLoaded, member)) for member in members}
        for member, answer in answers.items():
            if answer is not None and not answer.is_ok:
                logger.error("not loaded actor=%s reason=%s", member.actor, answer.error)
        return [member for member, answer in answers.items() if answer is not None and answer.is_ok]

    def _offer(self, weights: PublishedWeights, members: list[Member]) -> WeightsOffer:
        """Return the offer to rank 0, this side itself."""
        own_device = device_id(weights.buffer.device)
        return WeightsOffer(
            version=weights.version,
            group_epoch=self._epoch,
            rank=0,
            world_size=len(members) + 1,
            store_host=self._host,
            store_port=self._store.port,
            backend=backend_for([own_device, *(member.device for member in members)]),
            timeout_s=self._timeout_s,
            tensors=weights.tensors,
            total_bytes=weights.buffer.numel(),
            checksum=weights.checksum,
            canary_token_ids=weights.canary_token_ids,
        )

    def _collect(self, members: list[Member], kind: type) -> None:
        """Wait until every present member has answered, one has failed, or the time is over."""
        deadline = time.monotonic() + self._timeout_s
        while not self._stop_requested.is_set():
            present = [member for member in members if self._members.has(member)]
            is_complete = all((kind, member) in self._answers for member in present)
            is_doomed = kind is WeightsReady and self._has_broken(members)
            remaining_s = deadline - time.monotonic()
            if is_complete or is_doomed or remaining_s <= 0:
                return
            self._receive(min(WAIT_S, remaining_s))

    def _has_broken(self, members: list[Member]) -> bool:
        """Return whether this group cannot come together: somebody is gone, or has given up."""
        return any(
            not self._members.has(member) or (WeightsLoaded, member) in self._answers
            for member in members
        )

    def _is_cancelled(self, members: list[Member]) -> bool:
        self._receive(0.0)
        return self._stop_requested.is_set() or any(self._has_failed(m) for m in members)

    def _has_failed(self, member: Member) -> bool:
        answer = self._answers.get((WeightsLoaded, member))
        return not self._members.has(member) or (answer is not None and not answer.is_ok)

    def _leave_group(self) -> None:
        self._group.leave()
        self._group_members = []
