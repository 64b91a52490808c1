"""Membership of the weight plane: the engines that take part in broadcasts."""

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from common.weights.messages import WeightsJoin

logger = logging.getLogger(__name__)

SILENT_AFTER_S = 5.0


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
    held: int = -1  # The version of the copies that its workers keep; -1: none, or unknown.


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
                state.held = version
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
            state.held = version

    def held(self, member: EngineMember) -> int:
        """Return the version of the copies of a member's workers; -1: none, or unknown."""
        return self._by_actor[member.actor].held if self.has(member) else -1

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
                state.held = -1  # A sleeping engine has freed its copies.
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
