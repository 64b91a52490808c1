"""One version to some engines; a dead one is left behind.

A transfer is: offer -> each engine freezes and says ready -> broadcast -> each engine reports what
it loaded. Whoever leaves, falls silent or misses a deadline is removed; the others are offered the
version again at once, in a group without it.
"""

import logging
import threading
import time
from dataclasses import replace
from typing import Any

from common.errors import WeightSyncError
from common.wire.addresses import own_host_towards
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


class Transfers:
    """Brings versions to the members of the weight plane. For the publisher's thread."""

    def __init__(
        self,
        router: Router,
        members: Membership,
        canary: Canary,
        *,
        host: str,
        timeout_s: float,
        stop_requested: threading.Event,
    ) -> None:
        """Make one without members; the arguments are those of `Publisher`."""
        self._router = router
        self.members = members
        self.canary = canary
        self._host = host
        self._timeout_s = timeout_s
        self._stop_requested = stop_requested
        self._store = open_store(host, 0, is_server=True, timeout_s=timeout_s)
        self._group = WeightGroup()
        self._group_members: list[Member] = []
        self._epoch = 0
        self._answers: dict[tuple[type, Member], Any] = {}  # of this epoch and version
        self._lock = threading.Lock()
        self._pause_s: float | None = None  # the longest of an engine since the last drain
        self.current: PublishedWeights | None = None

    def drain_metrics(self) -> dict[str, float]:
        """Return what the transfers since the last call measured. For any thread."""
        with self._lock:
            pause_s, self._pause_s = self._pause_s, None
        return {} if pause_s is None else {"publish/pause_s": pause_s}

    def close(self) -> None:
        """Leave the group and close the store; whoever waits in it fails now."""
        self._group.leave()
        self._router.close()
        del self._store
        self._group.join(timeout_s=STOP_S / 2)

    def receive(self, timeout_s: float) -> None:
        """Take in what comes within `timeout_s`, or what woke the thread."""
        for received in self._router.receive_all(timeout_s=timeout_s):
            message = received.message
            match message:
                case WeightsJoin():
                    version = self.current.version if self.current is not None else -1
                    self.members.join(received.sender, message, current_version=version)
                case WeightsLeave():
                    member = self.members.find(message.actor, message.incarnation)
                    if member is not None:
                        self.members.remove(member, reason="it left")
                case CanaryScores():
                    self.canary.compare(message)
                case WeightsReady() | WeightsLoaded():
                    self._note_answer(message)
                case _:
                    reason = f"{type(message).__name__} is not for weights"
                    self._router.send(received.sender, Rejected(reason=reason))
        self.members.forget_silent()

    def _note_answer(self, answer: WeightsReady | WeightsLoaded) -> None:
        member = self.members.find(answer.actor, answer.incarnation)
        is_asked = self.current is not None and answer.version == self.current.version
        if member is None or not is_asked or answer.group_epoch != self._epoch:
            return
        self._answers[type(answer), member] = answer
        if isinstance(answer, WeightsLoaded) and answer.is_ok:
            with self._lock:
                self._pause_s = max(self._pause_s or 0.0, answer.pause_s)

    def bring(self, weights: PublishedWeights, members: list[Member]) -> None:
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
                present = [member for member in members if self.members.has(member)]
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
        self.members.note_served(served)
        failed = [member for member in members if member not in served]
        for member in failed:
            if not self.members.has_asked(member):
                self.members.remove(member, reason=f"version {weights.version} is not loaded")
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
                self.members.remove(member, reason="unreachable")
        self._collect(members, WeightsReady)
        if not self._has_broken(members):  # else the others had no time to answer
            for member in members:
                if (WeightsReady, member) not in self._answers:
                    self.members.remove(member, reason="not ready in time")
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
            store_host=own_host_towards(self._host, [member.host for member in members]),
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
            present = [member for member in members if self.members.has(member)]
            is_complete = all((kind, member) in self._answers for member in present)
            is_doomed = kind is WeightsReady and self._has_broken(members)
            remaining_s = deadline - time.monotonic()
            if is_complete or is_doomed or remaining_s <= 0:
                return
            self.receive(min(WAIT_S, remaining_s))

    def _has_broken(self, members: list[Member]) -> bool:
        """Return whether this group cannot come together: somebody is gone, or has given up."""
        return any(
            not self.members.has(member) or (WeightsLoaded, member) in self._answers
            for member in members
        )

    def _is_cancelled(self, members: list[Member]) -> bool:
        self.receive(0.0)
        return self._stop_requested.is_set() or any(self._has_failed(m) for m in members)

    def _has_failed(self, member: Member) -> bool:
        answer = self._answers.get((WeightsLoaded, member))
        return not self.members.has(member) or (answer is not None and not answer.is_ok)

    def _leave_group(self) -> None:
        self._group.leave()
        self._group_members = []
