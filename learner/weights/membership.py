"""Who takes part in the weight plane: who joined, has not left and is not known to be gone."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from common.wire.weight_messages import WeightsJoin

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """An engine that takes weights. A restart has a new incarnation and is a new member."""

    sender: bytes  # its address at the router
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


class Membership:
    """The one list of members. For the publisher's thread, but where it says otherwise.

    An actor says hello again every few seconds, so whoever is removed and lives comes back by
    itself; removing somebody too early costs it one version at most.

    Example: join(a), join(b) -> both present, both newcomers. mark_silent([a's incarnation]) ->
    only b is present, and nobody waits for a. a is heard again: mark_silent([]), join(a).
    """

    def __init__(self) -> None:
        self._by_actor: dict[str, Member] = {}
        self._newcomers: dict[str, Member] = {}  # by actor: want the current version
        self._silent: frozenset[str] = frozenset()  # incarnations

    def mark_silent(self, incarnations: Iterable[str]) -> bool:
        """Count exactly these as silent from now on; True if that is news. For any thread."""
        before, self._silent = self._silent, frozenset(incarnations)
        return before != self._silent

    def join(self, member: Member, *, version: int, current_version: int) -> None:
        """Add an engine, which holds `version`, or note that it is still there."""
        if member.incarnation in self._silent:
            return
        is_known = self._by_actor.get(member.actor) == member
        if is_known and version == current_version:
            return
        if not is_known:
            logger.info("joined actor=%s incarnation=%s", member.actor, member.incarnation)
        self._by_actor[member.actor] = self._newcomers[member.actor] = member

    def find(self, actor: str, incarnation: str) -> Member | None:
        """Return the present member of this name and incarnation."""
        member = self._by_actor.get(actor)
        is_same = member is not None and member.incarnation == incarnation
        return member if is_same and incarnation not in self._silent else None

    def has(self, member: Member) -> bool:
        return self.find(member.actor, member.incarnation) == member

    def present(self) -> list[Member]:
        """Return those who are to be given every version. For any thread."""
        return [m for m in list(self._by_actor.values()) if m.incarnation not in self._silent]

    def forget_silent(self) -> None:
        """Remove the silent ones for good: they join again when they are back."""
        for member in list(self._by_actor.values()):
            if member.incarnation in self._silent:
                self.remove(member, reason="silent")

    def take_newcomers(self) -> list[Member]:
        """Return the members that asked for the current version, and forget that they did."""
        asked, self._newcomers = self._newcomers, {}
        return [member for member in self.present() if asked.get(member.actor) == member]

    def has_asked(self, member: Member) -> bool:
        """Return whether it asked for the current version since newcomers were last taken."""
        return self._newcomers.get(member.actor) == member

    def note_served(self, members: Iterable[Member]) -> None:
        """Count these as holding the current version."""
        for member in members:
            self._newcomers.pop(member.actor, None)

    def remove(self, member: Member, *, reason: str) -> None:
        """Forget a member that is gone."""
        if self._by_actor.get(member.actor) == member:
            logger.warning("removed actor=%s reason=%s", member.actor, reason)
            del self._by_actor[member.actor]
            self._newcomers.pop(member.actor, None)
