"""Which roles take part in the run, and when each was heard last."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from common.wire.messages import Heartbeat, Hello

WEIGHT = 0.1  # of a new episode in the means of an actor's speed
MAX_SLOWNESS = 1.5  # beyond which an actor counts as slower than the others
MIN_FINISHED = 8  # episodes before they say anything
HUNGRY_S = 1.0  # for which others wait for an actor that the gate refused
FORGET_S = 3600.0  # silence after which a dead member is not shown any more


_KEPT = (
    *("role", "name", "incarnation", "version", "is_dead"),
    *("num_finished", "held_mean", "wall_mean_s", "log_slowness"),
)


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
    num_slots: int = 0  # episodes at once, by its own word
    tokens_per_s: float = 0.0
    waiting_for: str = ""
    rss_bytes: int = 0
    num_finished: int = 0  # episodes
    held_mean: float = 0.0  # episodes at once, while they were played
    wall_mean_s: float = 0.0  # of an episode
    log_slowness: float = 0.0  # mean log of its seconds over what such an episode usually takes

    @property
    def is_slow(self) -> bool:
        """True if its episodes take longer than those of the others."""
        return self.log_slowness > math.log(MAX_SLOWNESS)

    @property
    def episodes_per_s(self) -> float | None:
        """Measured speed, by Little's law from episodes at once and seconds of each."""
        if self.num_finished < MIN_FINISHED or self.wall_mean_s <= 0:
            return None
        return self.held_mean / self.wall_mean_s


class Members:
    """Actors and learner by name."""

    def __init__(self, *, dead_after_s: float) -> None:
        self._dead_after_s = dead_after_s
        self.by_name: dict[str, Member] = {}
        self._learners: dict[str, Member] = {}  # those of `by_name`
        self._hungry: dict[str, float] = {}  # actor -> when it last got less than it wanted

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
            self._enter(known)
        known.incarnation = message.incarnation
        known.version = message.version
        self.touch(known, now)
        return is_other

    def heartbeat(self, message: Heartbeat, now: float) -> Member:
        """Note what a role does. One that is not known (we restarted) is taken in."""
        member = self.by_name.get(message.name)
        if member is None:
            member = Member(role=message.role, name=message.name, incarnation="", version=0)
            self._enter(member)
        member.version = message.version
        member.running = len(message.running)
        member.num_slots = message.num_slots
        member.tokens_per_s = message.tokens_per_s
        member.waiting_for = message.waiting_for
        member.rss_bytes = message.rss_bytes
        self.touch(member, now)
        return member

    def _enter(self, member: Member) -> None:
        self.by_name[member.name] = member
        self._learners.pop(member.name, None)
        if member.role == "learner":
            self._learners[member.name] = member

    def finished(
        self, name: str, *, wall_s: float, num_held: int, usual_s: float | None = None
    ) -> None:
        """Note an episode of an actor.

        Args:
            wall_s: seconds that it took.
            num_held: episodes that the actor played when it ended, this one among them.
            usual_s: median seconds of such episodes of all actors; None: not known.
        """
        member = self.by_name.get(name)
        if member is None:
            return
        member.num_finished += 1
        weight = max(WEIGHT, 1 / member.num_finished)
        member.held_mean += weight * (num_held - member.held_mean)
        member.wall_mean_s += weight * (wall_s - member.wall_mean_s)
        if usual_s and wall_s > 0:
            member.log_slowness += weight * (math.log(wall_s / usual_s) - member.log_slowness)

    def refuse(self, name: str, now: float, *, has_some: bool) -> None:
        """An actor got less than it could play. It keeps its place in the row until it got some."""
        if has_some:
            self._hungry.pop(name, None)
        self._hungry[name] = now

    def feed(self, name: str) -> None:
        """This actor has all that it asked for."""
        self._hungry.pop(name, None)

    def hungriest(self, name: str, now: float) -> str:
        """Return who else waits for work, first in the row; "" if nobody."""
        for other, refused_at in list(self._hungry.items()):
            if now - refused_at > HUNGRY_S:
                del self._hungry[other]
            elif other != name:
                return other
        return ""

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
                self._learners.pop(member.name, None)
        return died

    def alive(self, role: str) -> list[Member]:
        """Return the living members of a role."""
        members = self._learners if role == "learner" else self.by_name
        return [m for m in members.values() if m.role == role and not m.is_dead]

    def has_other_actor(self, member: Member) -> bool:
        """True if another actor is alive beside this one."""
        everybody = self.by_name.values()
        return any(m.role == "actor" and not m.is_dead and m is not member for m in everybody)

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

    def snapshot(self) -> list[dict[str, Any]]:
        """Return what is not said anew with every heartbeat, of each."""
        return [{name: getattr(m, name) for name in _KEPT} for m in self.by_name.values()]

    def restore(self, state: list[dict[str, Any]], now: float) -> None:
        """Take over the state of `snapshot`; everybody has just been seen."""
        self._hungry = {}
        self.by_name, self._learners = {}, {}
        for entry in state:
            self._enter(Member(**entry, last_seen=now))

    def terms(self) -> dict[str, dict[str, float]]:
        """Return when each was heard last, and refused."""
        seen = {member.name: member.last_seen for member in self.by_name.values()}
        return {"seen": seen, "hungry": dict(self._hungry)}

    def restore_terms(self, terms: dict[str, dict[str, float]]) -> None:
        """Take over the times of `terms`."""
        for name, last_seen in terms["seen"].items():
            self.by_name[name].last_seen = last_seen
        self._hungry = dict(terms["hungry"])
