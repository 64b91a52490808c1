"""Who takes part in the weight plane: who is heard, has not left and is not known to be gone."""

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from common.wire.weight_messages import WeightsJoin

logger = logging.getLogger(__name__)

SILENT_AFTER_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """An engine that takes weights. A restart has a new incarnation and is a new member."""

    sender: bytes = field(compare=False)  # its address at the router; another after a reconnect
    actor: str
    incarnation: str
    devices: tuple[str, ...]  # one per worker: a GPU's own name; "" for the CPU
    host: str = ""  # by which it reaches the learner

    @staticmethod
    def of(sender: bytes, join: WeightsJoin) -> "Member":
        """Return who says hello."""
        return Member(
            sender=sender,
            actor=join.actor,
            incarnation=join.incarnation,
            devices=tuple(join.devices),
            host=join.host,
        )


@dataclass(slots=True)
class _Standing:
    """How it stands with a member."""

    member: Member
    heard_at: float
    is_asking: bool = True  # for the current version
    is_loading: bool = False  # an older version, for longer than others wait


class Membership:
    """The one list of members. For the publisher's thread, but where it says otherwise.

    An actor says hello with every heartbeat, so whoever is removed and lives comes back by itself;
    removing somebody too early costs it one version at most. Who failed is waited for by nobody
    until it has taken a version alone.

    Example: hear(a), hear(b) -> both present, both ask. mark_silent([a's incarnation]), or nothing
    of a for `silent_after_s` -> only b is present. a is heard again: it is given the version.
    """

    def __init__(self, *, silent_after_s: float = SILENT_AFTER_S) -> None:
        self._silent_after_s = silent_after_s
        self._by_actor: dict[str, _Standing] = {}
        self._silent: frozenset[str] = frozenset()  # incarnations, by the scheduler's word
        self._owing: set[str] = set()  # incarnations that failed, and have taken nothing since
        self._ready_s: dict[str, float] = {}  # by incarnation: the longest from offer to ready
        self._looked_at = time.monotonic()
        self._last_seen = time.monotonic()  # when there was a member, or the list was made

    def mark_silent(self, incarnations: Iterable[str]) -> bool:
        """Count exactly these as silent from now on; True if that is news. For any thread."""
        before, self._silent = self._silent, frozenset(incarnations)
        return before != self._silent

    def hear(
        self, member: Member, *, version: int, current_version: int, is_free: bool = True
    ) -> bool:
        """Note a sign of life of an engine, which holds `version`; enter it if it is free.

        Returns:
            True if it has come back on another connection: what was sent to it may be lost.
        """
        if member.incarnation in self._silent:
            return False
        standing = self._by_actor.get(member.actor)
        if standing is None or standing.member != member:
            if is_free:
                logger.info("joined actor=%s incarnation=%s", member.actor, member.incarnation)
                self._by_actor[member.actor] = _Standing(member, time.monotonic())
            return False
        has_moved = standing.member.sender != member.sender
        standing.member, standing.heard_at = member, time.monotonic()
        if is_free:
            standing.is_loading = False
            standing.is_asking = standing.is_asking or version != current_version
        return has_moved

    def find(self, actor: str, incarnation: str) -> Member | None:
        """Return the present member of this name and incarnation."""
        standing = self._by_actor.get(actor)
        if standing is None or standing.member.incarnation != incarnation:
            return None
        return None if incarnation in self._silent else standing.member

    def has(self, member: Member) -> bool:
        return self.find(member.actor, member.incarnation) == member

    def sender_of(self, member: Member) -> bytes:
        """Return where a member is reached now."""
        standing = self._by_actor.get(member.actor)
        return standing.member.sender if standing is not None else member.sender

    def present(self) -> list[Member]:
        """Return the members. For any thread."""
        standings = list(self._by_actor.values())
        return [s.member for s in standings if s.member.incarnation not in self._silent]

    @property
    def lonely_s(self) -> float:
        """Seconds for which there has been no member. For any thread."""
        return 0.0 if self.present() else time.monotonic() - self._last_seen

    def forget_silent(self) -> None:
        """Remove for good who is silent, once the queue is read: they join again when back.

        Who did not listen itself, because it was stopped, cannot say who was silent meanwhile.
        """
        now = time.monotonic()
        has_slept = now - self._looked_at > self._silent_after_s / 2
        self._looked_at = now
        if self._by_actor:
            self._last_seen = now
        for standing in list(self._by_actor.values()):
            if has_slept:
                standing.heard_at = now
            silent_s = now - standing.heard_at
            if standing.member.incarnation in self._silent:
                self.remove(standing.member, reason="silent")
            elif silent_s > self._silent_after_s:
                self.remove(standing.member, reason=f"not heard for {silent_s:.1f}s")

    def take_for_version(self) -> list[Member]:
        """Return who is to be given a new version together, and forget that they asked."""
        chosen = [m for m in self.present() if not self._is_apart(m)]
        for member in chosen:
            self._by_actor[member.actor].is_asking = False
        return chosen

    def take_newcomers(self) -> list[Member]:
        """Return who asked for the current version, and forget that they did.

        Who failed before comes alone, when nobody else asks.
        """
        asking = [m for m in self.present() if self.has_asked(m)]
        good = [m for m in asking if m.incarnation not in self._owing]
        chosen = good or asking[:1]
        for member in chosen:
            self._by_actor[member.actor].is_asking = False
        return chosen

    def _is_apart(self, member: Member) -> bool:
        return member.incarnation in self._owing or self._by_actor[member.actor].is_loading

    def has_asked(self, member: Member) -> bool:
        """Return whether it is free and has asked for the current version since it was taken."""
        standing = self._by_actor.get(member.actor)
        if standing is None or standing.member != member:
            return False
        return standing.is_asking and not standing.is_loading

    def note_served(self, members: Iterable[Member]) -> None:
        """Count these as holding the current version."""
        for member in members:
            self._owing.discard(member.incarnation)
            standing = self._by_actor.get(member.actor)
            if standing is not None and standing.member == member:
                standing.is_asking = False

    def note_failed(self, member: Member) -> None:
        """Let nobody wait for this one until it has taken a version alone."""
        self._owing.add(member.incarnation)

    def note_loading(self, member: Member) -> None:
        """Let nobody wait for this one until it is free."""
        standing = self._by_actor.get(member.actor)
        if standing is not None and standing.member == member:
            standing.is_loading = True

    def note_ready_s(self, member: Member, seconds: float) -> None:
        """Remember how long an engine took to begin to receive."""
        before = self._ready_s.get(member.incarnation, 0.0)
        self._ready_s[member.incarnation] = max(before, seconds)

    def patience_s(self, member: Member) -> float:
        """Return for how long to wait until an engine that lives begins to receive."""
        return max(self._silent_after_s, 3 * self._ready_s.get(member.incarnation, 0.0))

    def remove(self, member: Member, *, reason: str) -> None:
        """Forget a member that is gone."""
        standing = self._by_actor.get(member.actor)
        if standing is not None and standing.member == member:
            logger.warning("removed actor=%s reason=%s", member.actor, reason)
            del self._by_actor[member.actor]
