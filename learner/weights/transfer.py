"""Transfers one version to a set of engines; lost engines are removed.

Steps of a transfer: (1) offer; (2) the workers of each engine start to receive, and the engine
answers that it is ready; (3) the buckets are sent while the engine generates; (4) the engine stops
generating, loads the weights and reports. An engine that leaves, falls silent or misses a deadline
is removed. The remaining engines are offered the version again at once, in a group without it.

Engines of the learner's node receive no buckets. The version is written to memory before the offer,
and they map it.
"""

import logging
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from common.config.learner import WeightsTransport
from common.errors import LongstrideError, WeightSyncError
from common.weights.buckets import NUM_SLOTS, aligned
from common.weights.messages import (
    CanaryScores,
    WeightsCancel,
    WeightsJoin,
    WeightsLeave,
    WeightsLoaded,
    WeightsOffer,
    WeightsPing,
    WeightsReady,
)
from common.weights.node_copy import NodeCopy, node_id
from common.weights.rendezvous import StoreServer
from common.weights.transport import TransferCancelled, WeightGroup, device_id
from common.wire.addresses import own_host_towards
from common.wire.messages import Rejected
from common.wire.sockets import Router
from learner.weights.canary import Canary
from learner.weights.lock import WeightsLock, WeightsReadLock
from learner.weights.receivers import (
    MEMORY,
    SILENT_AFTER_S,
    Answers,
    EngineMember,
    Membership,
    ReceiverGroup,
    SenderPlace,
    engine_places,
    receiver_groups,
    refusal,
)
from learner.weights.source import PublishedWeights

logger = logging.getLogger(__name__)

WAIT_S = 0.5  # Seconds between two checks of deadlines; every message wakes the thread at once.
GRACE_S = 1.0  # Seconds for engines to load a received version after a newer version exists.
STOP_S = 2.0
GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishSettings:
    """Settings of the transfer of versions."""

    host: str  # Host of the rendezvous store.
    timeout_s: float  # Most seconds of each part of a transfer, if all members are alive.
    # Seconds without a heartbeat after which an engine is removed.
    silent_after_s: float = SILENT_AFTER_S
    max_canary_delta: float  # Largest mean |difference| in nats without an alarm.
    bucket_bytes: int = 256 << 20
    transport: WeightsTransport = WeightsTransport.AUTO
    num_parts: int = 1  # Parts of the fleet that are updated one after the other.
    keeps_versions: bool = False  # Send changes where an engine has the version before.


class TransferMetrics:
    """Durations and bytes of transfers until the next `drain`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._metrics: dict[str, float] = {}

    def note(self, name: str, seconds: float, *, size_gb: float, is_sum: bool) -> None:
        """Record a duration, also per GB.

        Args:
            is_sum: add the durations since the last `drain`; else keep the longest.
        """
        with self._lock:
            for key, value in ((name, seconds), (f"{name}_per_gb", seconds / size_gb)):
                before = self._metrics.get(key, 0.0)
                self._metrics[key] = before + value if is_sum else max(before, value)

    def add(self, name: str, amount: float) -> None:
        """Add to a count since the last `drain`."""
        with self._lock:
            self._metrics[name] = self._metrics.get(name, 0.0) + amount

    def drain(self) -> dict[str, float]:
        """Return the metrics measured since the last call."""
        with self._lock:
            metrics = self._metrics
            self._metrics = {}
        return metrics


class NodeMemory:
    """Holds one version for the engines of the learner's node. For the publisher's thread.

    Example: reserve(v3); write(v3) copies the weights, which may change from then on; place is the
    text by which engines find the copy. An engine that joins later maps it, too. reserve(v4) takes
    the same memory, unless an engine still reads v3. Then v4 gets new memory.
    """

    def __init__(self) -> None:
        """Start without memory."""
        self.node = node_id()
        self.place = ""
        self._copy: NodeCopy | None = None
        self._version = -1
        self._source: weakref.ref[object] | None = None  # The source of the version in the copy.

    def has(self, weights: PublishedWeights) -> bool:
        """Return whether the copy is this version."""
        is_same = self._source is not None and self._source() is weights.source
        return is_same and self._version == weights.version

    def reserve(self, weights: PublishedWeights) -> bool:
        """Take memory for a version; return False, with a warning, if there is too little."""
        num_bytes = weights.source.total_bytes
        copy = self._copy
        self._copy = None
        self._source = None
        if copy is None or copy.buffer.numel() != num_bytes or not copy.claim():
            copy = None  # The old memory is freed first.
            try:
                copy = NodeCopy(num_bytes)
            except WeightSyncError as error:
                logger.warning(
                    "engines of this node receive over gloo version=%d reason=%s",
                    weights.version,
                    error,
                )
                return False
        self._copy = copy
        return True

    def write(
        self,
        weights: PublishedWeights,
        group: WeightGroup,
        slots: Sequence[Tensor],
        offer: WeightsOffer,
        *,
        is_cancelled: Callable[[], bool],
    ) -> float:
        """Copy a version to the reserved memory; return the seconds it took.

        Args:
            slots: as for `write_buckets`.

        Raises: LongstrideError: as `WeightGroup.write`, or `fill` of the source.
        """
        copy = self._copy
        assert copy is not None, "memory was reserved"
        self._copy = None  # A cancelled thread may still write to this memory.
        copy.version = -1
        source = weights.source
        digest, seconds = group.write(
            copy.buffer, slots, source.read, offer, check=source.check, is_cancelled=is_cancelled
        )
        copy.version = weights.version
        self.place = copy.show(digest)
        self._copy = copy
        self._version = weights.version
        self._source = weakref.ref(weights.source)
        return seconds


@dataclass(slots=True)
class TransferGroup:
    """The process group of the engines that receive together."""

    epoch: int
    key: str  # Secret name of the group in the rendezvous.
    group: WeightGroup = field(default_factory=WeightGroup)


class TransferGroups:
    """One process group for each set of engines that receive together.

    An engine is in one group at a time: a new group ends its older ones.
    """

    def __init__(self, open_group: Callable[[], str]) -> None:
        """Start without groups; `open_group` returns the secret name of a new group."""
        self._open_group = open_group
        self._groups: dict[ReceiverGroup, TransferGroup] = {}
        self._left: list[WeightGroup] = []
        # Random, so that it differs from the epochs of an earlier learner.
        self._last_epoch = secrets.randbelow(1 << 31)
        self._slots: list[Tensor] = []  # Two buckets, on the device that sends.

    def of(
        self, receivers: ReceiverGroup, *, is_present: Callable[[EngineMember], bool]
    ) -> TransferGroup:
        """Return the group of these receivers.

        Groups that share a member with these receivers, or that have a lost member, are closed.
        """
        for other in list(self._groups):
            is_shared = other != receivers and not set(other.members).isdisjoint(receivers.members)
            if is_shared or not all(is_present(member) for member in other.members):
                self.leave(other)
        if receivers not in self._groups:
            self._last_epoch += 1
            self._groups[receivers] = TransferGroup(self._last_epoch, self._open_group())
            names = ", ".join(member.actor for member in receivers.members)
            logger.info(
                "engines receive together transport=%s actors=%s", receivers.transport, names
            )
        return self._groups[receivers]

    def leave(self, receivers: ReceiverGroup) -> None:
        """Close the group of these receivers; any thread that waits in it fails now."""
        transfer_group = self._groups.pop(receivers, None)
        if transfer_group is not None:
            transfer_group.group.leave()
            self._left = [group for group in [*self._left, transfer_group.group] if group.is_busy]

    def slots(self, offer: WeightsOffer, device: torch.device) -> list[Tensor]:
        """Return the two buckets to send from; they are reused, because allocation is slow."""
        place = device if offer.transport in ("nccl", "ipc") else torch.device("cpu")
        size = min(offer.bucket_bytes, offer.total_bytes)
        if not self._slots or self._slots[0].device != place or self._slots[0].numel() < size:
            self._slots = []
            is_pinned = device.type == "cuda" and place.type == "cpu"
            self._slots = [
                torch.zeros(size, dtype=torch.uint8, device=place, pin_memory=is_pinned)
                for _ in range(NUM_SLOTS)
            ]
        return self._slots

    def drop_slots(self) -> None:
        """Allocate new buckets next time: an abandoned transfer may still write to these."""
        self._slots = []

    def leave_all(self) -> list[WeightGroup]:
        """Close every group; return the groups whose threads may still run."""
        groups = [*self._left, *(each.group for each in self._groups.values())]
        for group in groups:
            group.leave()
        self._slots = []
        return groups


def join_all(groups: list[WeightGroup], *, timeout_s: float) -> None:
    """Wait for the threads of closed groups, after the store of the groups is closed."""
    deadline = time.monotonic() + timeout_s
    for group in groups:
        group.join(timeout_s=max(0.0, deadline - time.monotonic()))


class _BroadcastContext(NamedTuple):
    """Context shared by all attempts to send a version to a group of engines."""

    weights: PublishedWeights
    reading: WeightsReadLock
    load_limit_s: float  # Seconds for engines to load the version.
    # True for the last group: the next step may begin when the group has the bytes.
    is_last: bool = False


class Transfers:
    """Sends versions to the members of the weight plane. For the publisher's thread."""

    def __init__(
        self,
        router: Router,
        members: Membership,
        canary: Canary,
        settings: PublishSettings,
        *,
        weights_lock: WeightsLock,
        stop_requested: threading.Event,
    ) -> None:
        self._router = router
        self.members = members
        self.canary = canary
        self._settings = settings
        self._weights_lock = weights_lock
        self._stop_requested = stop_requested
        self.rendezvous = StoreServer(settings.host)
        self._groups = TransferGroups(self.rendezvous.open_group)
        self._memory = NodeMemory()
        self._answers = Answers()
        self._measures = TransferMetrics()
        self._pinged_at = 0.0
        self.current: PublishedWeights | None = None

    def drain_metrics(self) -> dict[str, float]:
        """Return the metrics of the transfers since the last call. For any thread."""
        return self._measures.drain()

    def close(self) -> None:
        """Leave the groups and close the store; any thread that waits in a group fails now."""
        groups = self._groups.leave_all()
        self._router.close()
        self.rendezvous.close()
        join_all(groups, timeout_s=STOP_S / 2)

    # --- received messages ----------------------------------------------------------------------

    def receive(self, timeout_s: float) -> None:
        """Process messages for up to `timeout_s` seconds, or until the thread is woken."""
        for received in self._router.receive_all(timeout_s=timeout_s):
            message = received.message
            match message:
                case WeightsJoin():
                    self._hear(received.sender, message)
                case WeightsLeave():
                    member = self.members.find(message.actor, message.incarnation)
                    if member is not None:
                        self.members.remove(member, reason="the engine left")
                case CanaryScores():
                    self.canary.compare(message)
                case WeightsReady() | WeightsLoaded():
                    self._note_answer(message)
                case _:
                    reason = f"the weight plane does not accept a {type(message).__name__}"
                    self._router.send(received.sender, Rejected(reason=reason))
        self.members.forget_silent()

    def _hear(self, sender: bytes, join: WeightsJoin) -> None:
        """Process a heartbeat: the engine's identity, its version, and its current transfer."""
        member = EngineMember.of(sender, join)
        if self.current is not None:
            reason = refusal(member, self._as_sender(), self._settings.transport)
            if reason:
                self._router.send(sender, Rejected(reason=reason))
                return
        has_moved = self.members.hear(
            member,
            version=join.version,
            current_version=self._current_version,
            is_free=not join.busy_epoch,
        )
        if self._answers.is_given_up(join.busy_epoch):
            self._router.send(sender, WeightsCancel(group_epoch=join.busy_epoch))
        if not self.members.has(member):
            return
        self.members.note_slept(member, join.slept)
        self._answers.derive_from_heartbeat(member, join)
        lost = self._answers.unanswered(member) if has_moved else None
        if lost is not None:
            self._router.send(sender, lost)
        if join.quiet_s > self._settings.silent_after_s:
            self._fail(member, f"the engine has not answered for {join.quiet_s:.1f} s")

    def _fail(self, member: EngineMember, reason: str) -> None:
        """Mark a member as failed and remove it."""
        self.members.note_failed(member)
        self.members.remove(member, reason=reason)

    def _as_sender(self) -> SenderPlace:
        """Return the place of the current version."""
        assert self.current is not None
        return SenderPlace(device_id(self.current.source.device), self._memory.node)

    def _note_answer(self, answer: WeightsReady | WeightsLoaded) -> None:
        """Record an engine's answer to the current offer."""
        member = self.members.find(answer.actor, answer.incarnation)
        if member is None or not self._answers.note(member, answer):
            return
        if isinstance(answer, WeightsLoaded) and not answer.is_ok:
            self.members.note_held(member, -1)
        if isinstance(answer, WeightsReady):
            self.members.note_ready_s(member, self._answers.waited_s(member))
        elif answer.is_ok:
            self._note("publish/pause_s", answer.pause_s, is_sum=False)
            self._note("publish/stage_s", answer.stage_s, is_sum=False)

    def _note(self, name: str, seconds: float, *, is_sum: bool) -> None:
        """Record a duration of the current version's transfer."""
        assert self.current is not None
        size_gb = self.current.source.total_bytes / GB
        self._measures.note(name, seconds, size_gb=size_gb, is_sum=is_sum)

    # --- transfers ------------------------------------------------------------------------------

    def broadcast(
        self,
        weights: PublishedWeights,
        members: list[EngineMember],
        *,
        is_held: bool = False,
        must_load: bool = False,
        is_superseded: Callable[[], bool] | None = None,
    ) -> None:
        """Send one version to the given members; remove those that fail, continue with the rest.

        A broken transfer does not reveal the faulty member. A dead one cannot be reached by the
        next offer. If all can be reached, each member gets its own transfer to find the faulty one.

        Args:
            is_held: the lock was entered for this transfer.
            must_load: wait also for engines that load slowly.
            is_superseded: returns True if there is a newer version. None: this is the newest, and
                not optional. An optional transfer returns the weights to the trainer before the
                first bucket.
        """
        reading = WeightsReadLock(
            self._weights_lock,
            is_live=weights.source.is_live,
            is_held=is_held,
            is_optional=is_superseded is not None,
            is_superseded=is_superseded,
        )
        limit_s = self._settings.timeout_s if must_load else self._settings.silent_after_s
        choice = self._settings.transport
        num_parts = self._settings.num_parts
        try:
            todo = receiver_groups(members, self._as_sender(), choice, num_parts=num_parts)
            for number, receivers in enumerate(todo, start=1):
                is_last = number == len(todo)
                self._broadcast_to(receivers, _BroadcastContext(weights, reading, limit_s, is_last))
        finally:
            reading.end()

    def _broadcast_to(self, receivers: ReceiverGroup, context: _BroadcastContext) -> None:
        """Send a version to a group; repeat without lost members."""
        num_broken = 0
        while receivers.members and not self._stop_requested.is_set():
            error = self._attempt(receivers, context)
            if error is None or context.reading.is_lost or context.reading.must_not_wait:
                return  # Members without this version get the next one.
            present = tuple(m for m in receivers.members if self._can_take(m, context.weights))
            is_broken = present == receivers.members
            num_broken += is_broken
            receivers = receivers._replace(members=present)
            if is_broken and num_broken > 1:
                self._isolate_faulty(receivers, context._replace(is_last=False))
                return

    def _isolate_faulty(self, receivers: ReceiverGroup, context: _BroadcastContext) -> None:
        """Send a version to each member alone, and remove those that fail."""
        weights = context.weights
        for member in receivers.members:
            error = self._attempt(receivers._replace(members=(member,)), context)
            if context.reading.is_lost or context.reading.must_not_wait:
                return
            if error is not None and self._can_take(member, weights):
                self._fail(member, f"version {weights.version}: {error}")

    def _can_take(self, member: EngineMember, weights: PublishedWeights) -> bool:
        """Return whether a member is present, and holds the version that changes belong to."""
        is_whole = weights.base < 0
        return self.members.has(member) and (is_whole or self.members.held(member) == weights.base)

    def _attempt(
        self, receivers: ReceiverGroup, context: _BroadcastContext
    ) -> WeightSyncError | None:
        """Transfer once; return an error if not all present members took part."""
        if receivers.transport == MEMORY:
            weights = context.weights
            if weights.base < 0 and (self._memory.has(weights) or self._memory.reserve(weights)):
                # Workers keep no copy for changes, because a copy in memory costs less.
                context = context._replace(weights=replace(weights, digest=""))
            else:
                receivers = receivers._replace(transport="gloo")
        try:
            self._transfer_once(receivers, context)
        except LongstrideError as error:
            self._cancel(context.weights, receivers, error)
            # Such weights must not be sent to any engine.
            if not isinstance(error, WeightSyncError):
                raise
            return error
        self._finish(receivers, context)
        return None

    def _cancel(
        self, weights: PublishedWeights, receivers: ReceiverGroup, error: LongstrideError
    ) -> None:
        """Cancel a failed transfer at all its receivers."""
        names = ", ".join(member.actor for member in receivers.members)
        logger.error(
            "transfer failed version=%d actors=%s reason=%s", weights.version, names, error
        )
        self._answers.give_up()
        for member in receivers.members:
            sender = self.members.sender_of(member)
            self._router.send(sender, WeightsCancel(group_epoch=self._answers.epoch))
        self._groups.drop_slots()
        self._groups.leave(receivers)

    def _transfer_once(self, receivers: ReceiverGroup, context: _BroadcastContext) -> None:
        """Send the offers, wait until all members are ready, send the buckets.

        In memory the version is written before the offers, unless it is there. Engines map it
        independently, so that a lost one costs the others nothing.

        Raises:
            WeightSyncError: not all were ready, or the transfer failed; the version may have
                reached some members.
        """
        weights = context.weights
        reading = context.reading
        is_in_memory = receivers.transport == MEMORY
        has_copy = is_in_memory and self._memory.has(weights)
        if not has_copy and not reading.begin():
            raise TransferCancelled(f"version {weights.version} was replaced")
        transfer_group = self._groups.of(receivers, is_present=self.members.has)
        self._answers.begin(transfer_group.epoch, weights.version)
        members = receivers.members
        places, num_copies = engine_places(receivers)
        offer = self._offer(weights, receivers, transfer_group.key, num_copies)
        if is_in_memory:
            if not has_copy:
                self._write(offer, transfer_group, context)
            if context.is_last:
                reading.end()  # The next step may change the weights while engines load.
            places = [place._replace(copy_key=self._memory.place) for place in places]
        for member, place in zip(members, places, strict=True):
            addressed = replace(
                offer, rank=place.rank, copy_key=place.copy_key, copy_index=place.copy_index
            )
            self._answers.offered(member, addressed)
            self._send(member, addressed)
        self._collect_ready(receivers, reading)
        if is_in_memory:
            return
        if reading.must_not_wait or self._has_broken(receivers):
            raise TransferCancelled(f"not all engines are ready epoch={transfer_group.epoch}")
        seconds = transfer_group.group.send(
            self._groups.slots(offer, weights.source.device),
            weights.source.read,
            offer,
            check=weights.source.check,
            is_cancelled=lambda: self._is_cancelled(members, reading),
        )
        self._note_sent(offer.total_bytes * num_copies, seconds)
        if context.is_last:
            reading.end()

    def _write(
        self, offer: WeightsOffer, transfer_group: TransferGroup, context: _BroadcastContext
    ) -> None:
        """Write a version to the memory that engines of this node map.

        Raises: as `_transfer_once`.
        """
        weights = context.weights
        reading = context.reading
        if reading.must_not_wait:
            raise TransferCancelled(f"the weights are needed epoch={transfer_group.epoch}")
        source = weights.source
        is_on_gpu = source.is_live and source.device.type == "cuda"
        seconds = self._memory.write(
            weights,
            transfer_group.group,
            self._groups.slots(offer, source.device) if is_on_gpu else [],
            offer,
            is_cancelled=lambda: self._is_cancelled((), reading),
        )
        self._note_sent(offer.total_bytes, seconds)

    def _note_sent(self, num_bytes: int, seconds: float) -> None:
        """Record a transfer."""
        self._note("publish/transfer_s", seconds, is_sum=True)
        self._measures.add("publish/bytes", float(num_bytes))

    def _send(self, member: EngineMember, message: WeightsOffer | WeightsPing) -> None:
        """Send a message to a member; remove the member if its connection is lost."""
        if not self._router.send(self.members.sender_of(member), message):
            self.members.remove(member, reason="unreachable")

    def _offer(
        self, weights: PublishedWeights, receivers: ReceiverGroup, group_key: str, num_copies: int
    ) -> WeightsOffer:
        """Return the offer for rank 0, which is this process."""
        return WeightsOffer(
            version=weights.version,
            group_epoch=self._answers.epoch,
            rank=0,
            world_size=1 + num_copies,
            store_host=own_host_towards(
                self._settings.host, [member.host for member in receivers.members]
            ),
            store_port=self.rendezvous.port,
            store_public=self.rendezvous.place.public,
            store_secret=self.rendezvous.place.secret,
            group_key=group_key,
            transport=receivers.transport,
            timeout_s=self._settings.timeout_s,
            tensors=weights.tensors,
            total_bytes=weights.source.total_bytes,
            bucket_bytes=aligned(self._settings.bucket_bytes),
            canary_token_ids=weights.canary_token_ids,
            base=weights.base,
            digest=weights.digest,
        )

    def _collect_ready(self, receivers: ReceiverGroup, reading: WeightsReadLock) -> None:
        """Wait until every member receives; remove living members that do not start in time."""
        while not self._stop_requested.is_set():
            waiting = [
                member
                for member in receivers.members
                if self.members.has(member) and not self._answers.is_ready(member)
            ]
            if not waiting or reading.must_not_wait or self._has_broken(receivers):
                return
            for member in waiting:
                limit_s = min(self.members.ready_limit_s(member), self._settings.timeout_s)
                if self._answers.waited_s(member) > limit_s:
                    self._fail(member, f"not ready within {limit_s:g} s")
            self._ping(waiting)
            if not self._has_broken(receivers):
                self.receive(WAIT_S)

    def _ping(self, waiting: list[EngineMember]) -> None:
        """Ping members that owe an answer, at most every `WAIT_S`, to detect lost connections."""
        if time.monotonic() - self._pinged_at >= WAIT_S:
            self._pinged_at = time.monotonic()
            for member in waiting:
                if self.members.has(member):
                    self._send(member, WeightsPing(version=self._current_version))

    def _finish(self, receivers: ReceiverGroup, context: _BroadcastContext) -> None:
        """Wait until all members have loaded the version; continue without slow ones."""
        sent_at = time.monotonic()
        deadline = sent_at + context.load_limit_s
        while not self._stop_requested.is_set():
            waiting = [
                member
                for member in receivers.members
                if self.members.has(member) and self._answers.loaded(member) is None
            ]
            if context.reading.is_superseded():
                deadline = min(deadline, sent_at + GRACE_S)
            remaining_s = deadline - time.monotonic()
            if not waiting or remaining_s <= 0:
                break
            self._ping(waiting)
            self.receive(min(WAIT_S, remaining_s))
        for member in receivers.members:
            self._settle(context.weights, member)
        if not all(self.members.has(member) for member in receivers.members):
            self._groups.leave(receivers)

    def _settle(self, weights: PublishedWeights, member: EngineMember) -> None:
        """Record a member's final answer."""
        answer = self._answers.loaded(member)
        held_after = weights.version if weights.digest else -1
        if answer is None:
            if self.members.has(member):
                logger.warning("still loading actor=%s version=%d", member.actor, weights.version)
            self.members.note_loading(member, held_after=held_after)
        elif answer.is_ok:
            self.members.note_served(member)
            self.members.note_held(member, held_after)
        elif weights.base >= 0:
            logger.warning("changes not taken actor=%s reason=%s", member.actor, answer.error)
            self.members.note_held(member, -1)
        else:
            self._fail(member, f"version {weights.version} was not loaded: {answer.error}")

    @property
    def _current_version(self) -> int:
        return -1 if self.current is None else self.current.version

    def _has_broken(self, receivers: ReceiverGroup) -> bool:
        """Return whether this group cannot start: a member is lost or has given up."""
        return receivers.transport != MEMORY and any(
            not self.members.has(member) or self._answers.loaded(member) is not None
            for member in receivers.members
        )

    def _is_cancelled(self, members: tuple[EngineMember, ...], reading: WeightsReadLock) -> bool:
        """Return whether a transfer must end: a stop, the trainer, or a failed member."""
        self.receive(0.0)
        is_over = self._stop_requested.is_set() or reading.must_end
        return is_over or any(self._has_failed(m) for m in members)

    def _has_failed(self, member: EngineMember) -> bool:
        """Return whether a member is lost or has reported a failure."""
        answer = self._answers.loaded(member)
        return not self.members.has(member) or (answer is not None and not answer.is_ok)
