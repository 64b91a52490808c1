"""Which roles take part in the run, and when each was heard last."""

import math
from dataclasses import dataclass, field, fields
from typing import Any

from common.wire.messages import Goodbye, Heartbeat, Hello
from learner.scheduler.state import FIXED, VOLATILE

WEIGHT = 0.1  # of a new episode in the means of an actor's speed
MAX_SLOWNESS = 1.5  # beyond which an actor counts as slower than the others
MIN_FINISHED = 8  # episodes before they say anything
REFUSED_S = 1.0  # for which others wait for an actor that the gate refused
FORGET_S = 3600.0  # silence after which a dead member is not shown any more


@dataclass(slots=True, kw_only=True)
class Member:
    """One process of the run."""

    role: str
    name: str
    incarnation: str  # "" until it says hello
    version: int  # of the weights that it holds
    node: str = ""  # its machine
    num_restarts: int = 0  # other processes that had its name before
    is_dead: bool = False  # or it has left
    is_silent: bool = field(default=False, metadata=VOLATILE)  # others play what it held
    last_seen: float = field(default=0.0, metadata=VOLATILE)  # core's clock
    running: int = field(default=0, metadata=VOLATILE)  # episodes
    num_slots: int = field(default=0, metadata=VOLATILE)  # episodes at once, as it says itself
    tokens_per_s: float = field(default=0.0, metadata=VOLATILE)  # sampled or trained
    waiting_for: str = field(default="", metadata=VOLATILE)  # "" when busy
    rss_bytes: int = field(default=0, metadata=VOLATILE)
    cpu_s: float = field(default=0.0, metadata=VOLATILE)  # of processors, since its start
    unchanged_s: float = field(default=0.0, metadata=VOLATILE)  # without progress, as it says
    is_playing: bool = False  # of a run with spare engines: it is none of them
    refused: dict[str, int] = field(default_factory=dict[str, int], metadata=VOLATILE)
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


_SHOWN = tuple(f.name for f in fields(Member) if f.name != "last_seen")


@dataclass(slots=True)
class Members:
    """Actors and learner by name: who lives, who is silent, who waits for work."""

    dead_after_s: float = field(metadata=FIXED)  # silence after which the leases are issued again
    silent_after_s: float = field(metadata=FIXED)  # and after which others need not wait for it
    engines: frozenset[str] = field(default=frozenset(), metadata=FIXED)  # with spares among them
    num_playing: int = field(default=0, metadata=FIXED)  # of them at once
    by_name: dict[str, Member] = field(default_factory=dict[str, Member])
    refused: dict[str, float] = field(  # actor -> when it last got less than it asked for
        default_factory=dict[str, float], metadata=VOLATILE
    )
    replaced: dict[str, float] = field(  # incarnation -> when another took its name
        default_factory=dict[str, float], metadata=VOLATILE
    )
    _learners: dict[str, Member] = field(default_factory=dict[str, Member], metadata=FIXED)

    def after_restore(self) -> None:
        """Find the learners among all."""
        self._learners = {m.name: m for m in self.by_name.values() if m.role == "learner"}

    def hello(self, message: Hello, now: float) -> bool:
        """Enter a role; return True if it is a new process under a name that was known."""
        known = self.by_name.get(message.name)
        is_other = known is not None and known.incarnation not in ("", message.incarnation)
        if is_other and known is not None:
            self.replaced[known.incarnation] = now
        num_restarts = known.num_restarts + is_other if known else 0
        if known is None or is_other:
            known = self._enter(message)
        known.incarnation, known.num_restarts = message.incarnation, num_restarts
        known.node = message.node
        known.version = message.version
        self.touch(known, now)
        return is_other

    def heartbeat(self, message: Heartbeat, now: float) -> Member:
        """Note what a role does. One that is not known (we restarted) is taken in."""
        member = self.by_name.get(message.name) or self._enter(message)
        member.version = message.version
        member.running = len(message.running)
        member.num_slots = message.num_slots
        member.tokens_per_s = message.tokens_per_s
        member.waiting_for = message.waiting_for
        member.rss_bytes = message.rss_bytes
        member.cpu_s = message.cpu_s
        member.unchanged_s = message.unchanged_s
        member.refused = message.refused
        self.touch(member, now)
        return member

    def _enter(self, message: Hello | Heartbeat) -> Member:
        member = Member(role=message.role, name=message.name, incarnation="", version=0)
        self.by_name[member.name] = member
        self._learners.pop(member.name, None)
        if member.role == "learner":
            self._learners[member.name] = member
        return member

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
        """Note that an actor got less than it could play. It keeps its turn until it got some."""
        if has_some:
            self.refused.pop(name, None)
        self.refused[name] = now

    def satisfy(self, name: str) -> None:
        """Note that an actor has all that it asked for."""
        self.refused.pop(name, None)

    def first_refused(self, name: str, now: float) -> str:
        """Return which other actor has waited for work longest; "" if none."""
        late, found = list[str](), ""
        for other, refused_at in self.refused.items():
            if now - refused_at > REFUSED_S:
                late.append(other)
            elif other != name:
                found = other
                break
        for other in late:
            del self.refused[other]
        return found

    def is_spare(self, member: Member, now: float) -> bool:
        """Return whether an actor holds back, as enough others play; one that need not begins.

        Example (one actor, one spare): actor-0 asks first and plays, actor-1 holds back. actor-0
        has not been heard of for 5 heartbeats -> actor-1 plays. actor-0 comes back and holds back.
        """
        if member.name not in self.engines or member.is_playing:
            return False
        since = now - self.silent_after_s
        engines = [self.by_name[name] for name in self.engines if name in self.by_name]
        playing = [m for m in engines if m.is_playing and not m.is_dead and m.last_seen >= since]
        member.is_playing = len(playing) < self.num_playing
        return not member.is_playing

    def touch(self, member: Member, now: float) -> None:
        """Record a sign of life."""
        member.last_seen = now
        member.is_dead = member.is_silent = False

    def touch_all(self, now: float) -> None:
        """Record a sign of life of all: the times of a former process say nothing here."""
        for member in self.by_name.values():
            member.last_seen = now

    def leave(self, message: Goodbye, now: float) -> bool:
        """Mark a member that says goodbye; False if it is not known, or another process."""
        member = self.by_name.get(message.name)
        if member is None or member.incarnation not in ("", message.incarnation):
            return False
        member.incarnation, member.is_dead = message.incarnation, True
        member.last_seen = now
        self.satisfy(member.name)
        return True

    def silent(self, now: float) -> list[str]:
        """Return the incarnations of actors that left, died, or have not been heard of lately."""
        since = now - self.silent_after_s
        actors = [m for m in self.by_name.values() if m.role == "actor" and m.incarnation]
        gone = [m.incarnation for m in actors if m.is_dead or m.last_seen < since]
        return [*self.replaced, *gone]

    def fall_silent(self, now: float) -> list[Member]:
        """Return the actors newly silent, if others are heard who can play what they hold."""
        actors = [m for m in self.by_name.values() if m.role == "actor" and not m.is_dead]
        late = [m for m in actors if now - m.last_seen > self.silent_after_s]
        found = [m for m in late if not m.is_silent] if len(late) < len(actors) else []
        for member in found:
            member.is_silent = True
        return found

    def expire(self, now: float) -> list[Member]:
        """Mark the dead; return those newly found dead. Forget the long dead."""
        for incarnation, replaced_at in list(self.replaced.items()):
            if now - replaced_at > FORGET_S:
                del self.replaced[incarnation]
        silent = [m for m in self.by_name.values() if now - m.last_seen > self.dead_after_s]
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

    def is_alive(self, name: str) -> bool:
        """Return whether somebody of this name is there."""
        return name in self.by_name and not self.by_name[name].is_dead

    def is_learner_away(self, now: float) -> bool:
        """Return whether there was a learner and none has been heard of lately."""
        known = self._learners.values()
        since = now - self.silent_after_s
        return bool(known) and all(m.is_dead or m.last_seen < since for m in known)

    def has_other_actor(self, member: Member) -> bool:
        """True if another actor is alive beside this one."""
        everybody = self.by_name.values()
        return any(m.role == "actor" and not m.is_dead and m is not member for m in everybody)

    def report(self, role: str, now: float) -> list[dict[str, Any]]:
        """Return the members of a role for the status."""
        return [
            {
                **{name: getattr(member, name) for name in _SHOWN},
                "last_seen_s": round(now - member.last_seen, 3),
            }
            for member in self.by_name.values()
            if member.role == role
        ]
