"""Which roles take part in the run, and when each was heard last."""

from dataclasses import asdict, dataclass
from typing import Any

from common.messages import Heartbeat, Hello

FORGET_S = 3600.0  # silence after which a dead member is not shown any more


@dataclass(slots=True, kw_only=True)
class Member:
    """One process of the run."""

    role: str
    name: str
    incarnation: str  # "" until it says hello
    version: int
    last_seen: float = 0.0  # core's clock
    is_dead: bool = False
    running: int = 0  # episodes
    tokens_per_s: float = 0.0
    waiting_for: str = ""
    rss_bytes: int = 0


class Members:
    """Actors and learner by name."""

    def __init__(self, *, dead_after_s: float) -> None:
        self._dead_after_s = dead_after_s
        self.by_name: dict[str, Member] = {}

    def hello(self, message: Hello, now: float) -> bool:
        """Enter a role; True if it is a new process under a name that was known."""
        known = self.by_name.get(message.name)
        is_other = known is not None and known.incarnation not in ("", message.incarnation)
        if known is None or is_other:
            known = Member(
                role=message.role,
                name=message.name,
                incarnation=message.incarnation,
                version=message.version,
            )
            self.by_name[message.name] = known
        known.incarnation = message.incarnation
        known.version = message.version
        self.touch(known, now)
        return is_other

    def heartbeat(self, message: Heartbeat, now: float) -> Member:
        """Note what a role does. One that is not known (we restarted) is taken in."""
        member = self.by_name.get(message.name)
        if member is None:
            member = Member(role=message.role, name=message.name, incarnation="", version=0)
            self.by_name[message.name] = member
        member.version = message.version
        member.running = len(message.running)
        member.tokens_per_s = message.tokens_per_s
        member.waiting_for = message.waiting_for
        member.rss_bytes = message.rss_bytes
        self.touch(member, now)
        return member

    def touch(self, member: Member, now: float) -> None:
        """It lives."""
        member.last_seen = now
        member.is_dead = False

    def bury(self, now: float) -> list[Member]:
        """Return the members that have just been found dead; forget those long dead."""
        silent = [m for m in self.by_name.values() if now - m.last_seen > self._dead_after_s]
        died = [member for member in silent if not member.is_dead]
        for member in died:
            member.is_dead = True
        for member in silent:
            if now - member.last_seen > FORGET_S:
                del self.by_name[member.name]
        return died

    def alive(self, role: str) -> list[Member]:
        """Return the living members of a role."""
        return [m for m in self.by_name.values() if m.role == role and not m.is_dead]

    def report(self, role: str, now: float) -> list[dict[str, Any]]:
        """Return the members of a role for the status."""
        return [
            {
                **{key: value for key, value in asdict(member).items() if key != "last_seen"},
                "last_seen_s": round(now - member.last_seen, 3),
            }
            for member in self.by_name.values()
            if member.role == role
        ]

    def snapshot(self) -> list[list[Any]]:
        """Return [role, name, incarnation, version, is_dead] of each."""
        return [
            [m.role, m.name, m.incarnation, m.version, m.is_dead] for m in self.by_name.values()
        ]

    def restore(self, state: list[list[Any]], now: float) -> None:
        """Take over the state of `snapshot`; everybody has just been seen."""
        self.by_name = {
            name: Member(
                role=role,
                name=name,
                incarnation=incarnation,
                version=version,
                last_seen=now,
                is_dead=is_dead,
            )
            for role, name, incarnation, version, is_dead in state
        }

    def terms(self) -> dict[str, float]:
        """Return when each was heard last."""
        return {member.name: member.last_seen for member in self.by_name.values()}

    def restore_terms(self, terms: dict[str, float]) -> None:
        """Take over the times of `terms`."""
        for name, last_seen in terms.items():
            self.by_name[name].last_seen = last_seen
