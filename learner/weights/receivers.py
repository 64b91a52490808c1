"""The engines that receive versions: who is present, by which transport, and what they answer.

Workers of one node share a copy. On the learner's node they map the learner's own copy. NCCL is the
exception: its ring of GPUs enters each node once, and every GPU receives. So is CUDA IPC, whose
receivers are on the learner's GPU.
"""

import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from common.config.learner import WeightsTransport
from common.weights.messages import WeightsJoin, WeightsLoaded, WeightsOffer, WeightsReady
from common.weights.transport import SLICE

logger = logging.getLogger(__name__)

SILENT_AFTER_S = 5.0
MEMORY = "memory"
NUM_REMEMBERED = 1_000  # Epochs of abandoned transfers that are kept.


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMember:
    """An engine that receives weights. A restart has a new incarnation and is a new member."""

    sender: bytes = field(compare=False)  # ROUTER identity; a reconnect changes it.
    actor: str
    incarnation: str
    devices: tuple[str, ...]  # One per worker: the id of its GPU; "" for the CPU.
    host: str = ""  # Host name by which the engine reaches the learner.
    node: str = ""  # Engines with the same name share memory; "": the engine shares none.

    @staticmethod
    def of(sender: bytes, join: WeightsJoin) -> "EngineMember":
        """Return the member that sent a hello."""
        return EngineMember(
            sender=sender,
            actor=join.actor,
            incarnation=join.incarnation,
            devices=tuple(join.devices),
            host=join.host,
            node=join.node,
        )


@dataclass(slots=True)
class _MemberState:
    """State of a member."""

    member: EngineMember
    heard_at: float
    is_asking: bool = True  # True if the member needs the current version.
    slept: int = 0  # Number of the latest request to sleep that the engine has obeyed.
    # True if the member is still loading a version after the deadline of the broadcast.
    is_loading: bool = False
    offered: int = -1  # The version that the member is loading.
    copies_version: int = -1  # Of the copies that its workers keep; -1: none, or unknown.


class Membership:
    """The list of all members. Only the publisher's thread calls it, unless a method is for any.

    An actor sends a hello with every heartbeat. So a removed member that is alive rejoins by
    itself, and a wrong removal costs it at most one version. A member that failed is left out of
    broadcasts until it has loaded a version in a transfer of its own.

    Example: hear(a), hear(b) -> both present, both ask. mark_silent([a's incarnation]), or no
    message of a for `silent_after_s` -> only b is present. The next message of a -> a is sent the
    version.
    """

    def __init__(self, *, silent_after_s: float = SILENT_AFTER_S) -> None:
        self._silent_after_s = silent_after_s
        self._by_actor: dict[str, _MemberState] = {}
        # Silent incarnations, as reported by the scheduler.
        self._silent: frozenset[str] = frozenset()
        # Members that failed and have not loaded a version since. An engine that shares no memory
        # any more is another member.
        self._failed: set[EngineMember] = set()
        self._ready_s: dict[str, float] = {}  # Incarnation -> longest time from offer to ready.
        self._polled_at = time.monotonic()
        self._last_seen = time.monotonic()  # Last time with a member, or the time of construction.

    def mark_silent(self, incarnations: Iterable[str]) -> bool:
        """Replace the set of silent incarnations; True if it changed. For any thread."""
        before = self._silent
        self._silent = frozenset(incarnations)
        return before != self._silent

    def hear(
        self, member: EngineMember, *, version: int, current_version: int, is_free: bool = True
    ) -> bool:
        """Record a message of an engine, which holds `version`; add the engine if it is free.

        Returns:
            True if it has reconnected: messages sent to it may be lost.
        """
        if member.incarnation in self._silent:
            return False
        state = self._by_actor.get(member.actor)
        if state is None or state.member != member:
            if is_free:
                logger.info(
                    "added engine actor=%s incarnation=%s", member.actor, member.incarnation
                )
                self._by_actor[member.actor] = _MemberState(member, time.monotonic())
            return False
        has_moved = state.member.sender != member.sender
        state.member, state.heard_at = member, time.monotonic()
        if is_free:
            if state.is_loading and version == state.offered:
                state.copies_version = version
            state.is_loading = False
            state.is_asking = state.is_asking or version != current_version
        return has_moved

    def find(self, actor: str, incarnation: str) -> EngineMember | None:
        """Return the present member of this name and incarnation, None if there is none."""
        state = self._by_actor.get(actor)
        if state is None or state.member.incarnation != incarnation:
            return None
        return None if incarnation in self._silent else state.member

    def has(self, member: EngineMember) -> bool:
        return self.find(member.actor, member.incarnation) == member

    def sender_of(self, member: EngineMember) -> bytes:
        """Return the current ROUTER identity of a member."""
        state = self._by_actor.get(member.actor)
        return state.member.sender if state is not None else member.sender

    def present(self) -> list[EngineMember]:
        """Return the members. For any thread."""
        states = list(self._by_actor.values())
        return [s.member for s in states if s.member.incarnation not in self._silent]

    @property
    def no_engine_s(self) -> float:
        """Seconds without any member. For any thread."""
        return 0.0 if self.present() else time.monotonic() - self._last_seen

    def forget_silent(self) -> None:
        """Remove silent members after all messages are read; they rejoin when they send again.

        If this process was suspended, the silence of the members is not known, so their deadlines
        are extended.
        """
        now = time.monotonic()
        has_slept = now - self._polled_at > self._silent_after_s / 2
        self._polled_at = now
        if self._by_actor:
            self._last_seen = now
        for state in list(self._by_actor.values()):
            if has_slept:
                state.heard_at = now
            silent_s = now - state.heard_at
            if state.member.incarnation in self._silent:
                self.remove(state.member, reason="silent")
            elif silent_s > self._silent_after_s:
                self.remove(state.member, reason=f"no heartbeat for {silent_s:.1f} s")

    def take_for_version(self) -> list[EngineMember]:
        """Return the members for a new version's broadcast, and clear their requests."""
        chosen = [m for m in self.present() if not self._is_skipped(m)]
        for member in chosen:
            self._by_actor[member.actor].is_asking = False
        return chosen

    def take_newcomers(self) -> list[EngineMember]:
        """Return the members that request the current version, and clear their requests.

        A member that failed before is returned alone, if no other member requests the version.
        """
        asking = [m for m in self.present() if self.has_asked(m)]
        good = [m for m in asking if m not in self._failed]
        chosen = good or asking[:1]
        for member in chosen:
            self._by_actor[member.actor].is_asking = False
        return chosen

    def _is_skipped(self, member: EngineMember) -> bool:
        """Return whether a broadcast skips a member: it has failed, or it still loads."""
        return member in self._failed or self._by_actor[member.actor].is_loading

    def has_asked(self, member: EngineMember) -> bool:
        """Return whether the member is free and requests the current version."""
        state = self._by_actor.get(member.actor)
        if state is None or state.member != member:
            return False
        return state.is_asking and not state.is_loading

    def note_served(self, member: EngineMember) -> None:
        """Record that a member has the current version."""
        self._failed.discard(member)
        state = self._by_actor.get(member.actor)
        if state is not None and state.member == member:
            state.is_asking = False

    def note_held(self, member: EngineMember, version: int) -> None:
        """Record the version of which a member's workers keep a copy; -1: they may keep none."""
        state = self._by_actor.get(member.actor)
        if state is not None and state.member == member:
            state.copies_version = version

    def held(self, member: EngineMember) -> int:
        """Return the version of the copies of a member's workers; -1: none, or unknown."""
        return self._by_actor[member.actor].copies_version if self.has(member) else -1

    def note_failed(self, member: EngineMember) -> None:
        """Mark a member as failed: broadcasts skip it until it has loaded a version alone."""
        self._failed.add(member)

    def note_loading(self, member: EngineMember, *, held_after: int) -> None:
        """Mark a member as busy: broadcasts skip it until it is free.

        Args:
            held_after: the version of its workers' copies once it is loaded; -1: none.
        """
        state = self._by_actor.get(member.actor)
        if state is not None and state.member == member:
            state.is_loading = True
            state.offered = held_after

    def note_slept(self, member: EngineMember, number: int) -> None:
        """Record the latest request to sleep that a member has obeyed."""
        state = self._by_actor.get(member.actor)
        if state is not None and state.member == member:
            if state.slept != number:
                state.copies_version = -1  # A sleeping engine has freed its copies.
            state.slept = number

    def awake(self, number: int) -> list[EngineMember]:
        """Return the members that have not obeyed this request to sleep."""
        return [m for m in self.present() if self._by_actor[m.actor].slept != number]

    def note_ready_s(self, member: EngineMember, seconds: float) -> None:
        """Record the seconds from the offer until an engine began to receive."""
        before = self._ready_s.get(member.incarnation, 0.0)
        self._ready_s[member.incarnation] = max(before, seconds)

    def ready_limit_s(self, member: EngineMember) -> float:
        """Return how many seconds to wait for a living engine to begin to receive."""
        return max(self._silent_after_s, 3 * self._ready_s.get(member.incarnation, 0.0))

    def remove(self, member: EngineMember, *, reason: str) -> None:
        """Remove a member that is lost."""
        state = self._by_actor.get(member.actor)
        if state is not None and state.member == member:
            logger.warning("removed engine actor=%s reason=%s", member.actor, reason)
            del self._by_actor[member.actor]


class ReceiverGroup(NamedTuple):
    """Engines that receive together."""

    transport: str  # The name of the transport in an offer.
    members: tuple[EngineMember, ...]


class SenderPlace(NamedTuple):
    """The place of the learner's weights."""

    device: str  # `device_id` of the weights.
    node: str = ""  # Engines with this node map memory of the learner; "": none can.

    def host_transport(self, member: EngineMember) -> str:
        """Return the transport by host memory to an engine."""
        return MEMORY if self.node and member.node == self.node else "gloo"


class EnginePlace(NamedTuple):
    """Fields of the offer to one engine."""

    rank: int
    copy_key: str
    copy_index: int


def engine_places(receivers: ReceiverGroup) -> tuple[list[EnginePlace], int]:
    """Return the place of each engine, in order, and the number of copies that are sent.

    Example: engines a and b on node n with two workers each, and c elsewhere with two workers.
    a's first worker receives rank 1 for all of n. c's workers share rank 2.

    On the learner's node no worker is the first one: the copy is the learner's.
    """
    if receivers.transport == MEMORY:
        return [EnginePlace(0, "", 1)] * len(receivers.members), 1
    num_workers = Counter[str]()
    for member in receivers.members:
        num_workers[member.node] += len(member.devices)
    copies: dict[str, EnginePlace] = {}  # The next free place of each shared copy, by node.
    places: list[EnginePlace] = []
    num_copies = 0
    for member in receivers.members:
        node = member.node
        if not node or num_workers[node] == 1 or receivers.transport != "gloo":
            places.append(EnginePlace(1 + num_copies, "", 0))
            num_copies += len(member.devices)
            continue
        if node not in copies:
            num_copies += 1
            copies[node] = EnginePlace(num_copies, f"copy/{secrets.token_hex(8)}", 0)
        place = copies[node]
        places.append(place)
        copies[node] = place._replace(copy_index=place.copy_index + len(member.devices))
    return places, num_copies


def transport_of(member: EngineMember, sender: SenderPlace, choice: WeightsTransport) -> str:
    """Return the transport to an engine; "" if the chosen one cannot reach it.

    NCCL needs a separate whole GPU for every rank, the learner's included. CUDA IPC needs the
    engine on the learner's GPU. All other cases use host memory.
    """
    own_device = sender.device
    devices = set(member.devices)
    can_share = bool(own_device) and devices == {own_device}
    has_own = len(devices) == len(member.devices) and own_device not in devices
    has_own &= not any(each.startswith(SLICE) for each in (own_device, *devices))
    has_gpus = bool(own_device) and all(devices)
    match choice:
        case WeightsTransport.AUTO:
            if can_share:
                return "ipc"
            return "nccl" if has_gpus and has_own else sender.host_transport(member)
        case WeightsTransport.IPC:
            return "ipc" if can_share else ""
        case WeightsTransport.NCCL:
            return "nccl" if has_gpus and has_own else ""
        case WeightsTransport.MEMORY:
            return MEMORY if sender.host_transport(member) == MEMORY else ""
        case _:
            return choice.value


def refusal(member: EngineMember, sender: SenderPlace, choice: WeightsTransport) -> str:
    """Return the reason why the chosen transport cannot reach an engine; "" if it can."""
    if transport_of(member, sender, choice):
        return ""
    devices = ", ".join(device or "the CPU" for device in member.devices)
    where = f"on {devices} from {sender.device or 'the CPU'}"
    if choice is WeightsTransport.MEMORY:
        where = "because it cannot map memory of the learner"
    return (
        f"learner.weights_transport={choice.value} cannot reach {member.actor} {where}; use"
        " learner.weights_transport=auto"
    )


def receiver_groups(
    members: Iterable[EngineMember],
    sender: SenderPlace,
    choice: WeightsTransport,
    *,
    num_parts: int,
) -> list[ReceiverGroup]:
    """Return the engines that receive together, in order; each group has one transport.

    Engines that share a GPU with each other use host memory.

    Args:
        num_parts: parts of the fleet; each part waits for the part before it.
    """
    members = sorted(members, key=lambda member: member.node)  # A node belongs to few parts.
    size = -(-len(members) // num_parts) or 1
    return [
        receivers
        for start in range(0, len(members), size)
        for receivers in _by_transport(members[start : start + size], sender, choice)
    ]


def _by_transport(
    members: Sequence[EngineMember], sender: SenderPlace, choice: WeightsTransport
) -> list[ReceiverGroup]:
    """Return the engines by transport; NCCL needs a GPU of its own for each."""
    by_transport: dict[str, list[EngineMember]] = {}
    num_uses = Counter(device for member in members for device in member.devices)
    for member in members:
        transport = transport_of(member, sender, choice)
        is_shared = any(num_uses[device] > 1 for device in member.devices)
        if transport == "nccl" and is_shared:
            transport = sender.host_transport(member)
        by_transport.setdefault(transport, []).append(member)
    return [
        ReceiverGroup(transport, tuple(engines))
        for transport, engines in sorted(by_transport.items())
        if transport
    ]


class Answers:
    """The answers to one offer. For the publisher's thread.

    If an answer is lost with a broken connection, the next heartbeat replaces it.

    Example: begin(epoch 7, version 3); offered(a); note(a is ready) -> is_ready(a). The final
    answer of a is lost, but its next hello is not busy and has version 3 -> loaded(a).is_ok.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._version = -1
        # Offer and time of sending, by member.
        self._offers: dict[EngineMember, tuple[WeightsOffer, float]] = {}
        self._ready: set[EngineMember] = set()
        self._loaded: dict[EngineMember, WeightsLoaded] = {}
        self._given_up: deque[int] = deque(maxlen=NUM_REMEMBERED)

    def begin(self, epoch: int, version: int) -> None:
        """Start a transfer and forget the one before."""
        self.epoch = epoch
        self._version = version
        self._offers = {}
        self._ready = set()
        self._loaded = {}

    def offered(self, member: EngineMember, offer: WeightsOffer) -> None:
        """Record the offer sent to a member."""
        self._offers[member] = (offer, time.monotonic())

    def unanswered(self, member: EngineMember) -> WeightsOffer | None:
        """Return the offer to a member that has not answered at all; else None."""
        sent = self._offers.get(member)
        has_answered = member in self._ready or member in self._loaded
        return None if sent is None or has_answered else sent[0]

    def waited_s(self, member: EngineMember) -> float:
        """Return the seconds since a member was offered the version."""
        sent = self._offers.get(member)
        return 0.0 if sent is None else time.monotonic() - sent[1]

    def note(self, member: EngineMember, answer: WeightsReady | WeightsLoaded) -> bool:
        """Record an answer; True if it belongs to this offer and is new."""
        if answer.group_epoch != self.epoch or answer.version != self._version:
            return False
        if isinstance(answer, WeightsReady):
            is_new = member not in self._ready
            self._ready.add(member)
            return is_new
        is_new = member not in self._loaded
        self._loaded[member] = answer
        return is_new

    def derive_from_heartbeat(self, member: EngineMember, join: WeightsJoin) -> None:
        """Derive a lost answer from a member's heartbeat."""
        is_over = not join.busy_epoch and member in self._ready and member not in self._loaded
        if is_over:
            is_ok = join.version == self._version
            self._loaded[member] = WeightsLoaded(
                actor=member.actor,
                incarnation=member.incarnation,
                version=self._version,
                group_epoch=self.epoch,
                is_ok=is_ok,
                error="" if is_ok else f"the engine is idle and has version {join.version}",
                stage_s=0.0,
                pause_s=0.0,
            )

    def is_ready(self, member: EngineMember) -> bool:
        """Return whether the member receives, or has received."""
        return member in self._ready or member in self._loaded

    def loaded(self, member: EngineMember) -> WeightsLoaded | None:
        """Return the member's final answer, None if there is none yet."""
        return self._loaded.get(member)

    def give_up(self) -> None:
        """Record that this transfer is abandoned."""
        self._given_up.append(self.epoch)

    def is_given_up(self, epoch: int) -> bool:
        """Return whether the transfer of this epoch was abandoned."""
        return epoch in self._given_up
