"""The roles that take part in the run, and the time of the last message of each."""

import math
from dataclasses import dataclass, field, fields
from typing import Any

from common.wire.messages import Goodbye, Heartbeat, Hello
from scheduler.state import FIXED, VOLATILE

WEIGHT = 0.1  # Weight of a new episode in the means of an actor's speed.
MAX_SLOWNESS = 1.5  # Ratio of durations above which an actor counts as slower than the others.
MIN_FINISHED = 8  # Episodes before the means are used.
REFUSED_S = 1.0  # Seconds for which a refused actor keeps its turn before other actors.
FORGET_S = 3600.0  # Seconds of silence after which a dead member is removed.


@dataclass(slots=True, kw_only=True)
class RunMember:
    """One process of the run."""

    role: str
    name: str
    incarnation: str  # Id of the process; "" until the hello of the process.
    version: int  # Version of the weights that the process holds.
    node: str = ""  # Name of the machine.
    commit: str = ""  # Name of the process's code.
    num_restarts: int = 0  # Number of earlier processes with the same name.
    is_dead: bool = False  # True if the process has died or left.
    # True if the episodes of the silent actor were issued to other actors.
    is_silent: bool = field(default=False, metadata=VOLATILE)
    last_seen: float = field(default=0.0, metadata=VOLATILE)  # Time of the core's clock.
    # Number of episodes that an actor plays, or of groups that the learner waits for.
    running: int = field(default=0, metadata=VOLATILE)
    # Most episodes at once, as the actor reports.
    num_slots: int = field(default=0, metadata=VOLATILE)
    # Tokens that an actor samples or the learner trains on.
    tokens_per_s: float = field(default=0.0, metadata=VOLATILE)
    # Name of the role or resource that the process waits for; "" when busy.
    waiting_for: str = field(default="", metadata=VOLATILE)
    rss_bytes: int = field(default=0, metadata=VOLATILE)
    cpu_s: float = field(default=0.0, metadata=VOLATILE)  # CPU seconds since the start.
    # Seconds without progress, as the process reports.
    unchanged_s: float = field(default=0.0, metadata=VOLATILE)
    # Environments that an actor cannot play, because no hub serves them now.
    absent: list[str] = field(default_factory=list[str], metadata=VOLATILE)
    is_playing: bool = False  # In a run with spare engines: True if the engine is not a spare.
    refused: dict[str, int] = field(default_factory=dict[str, int], metadata=VOLATILE)
    num_finished: int = 0  # Number of finished episodes.
    held_mean: float = 0.0  # Mean number of episodes at once.
    wall_mean_s: float = 0.0  # Mean seconds of an episode.
    log_slowness: float = 0.0  # Mean log of (seconds of an episode / median seconds of its kind).

    @property
    def is_slow(self) -> bool:
        """True if its episodes take longer than those of other actors."""
        return self.log_slowness > math.log(MAX_SLOWNESS)

    @property
    def episodes_per_s(self) -> float | None:
        """Speed by Little's law, from episodes at once and seconds of each; None: not known."""
        if self.num_finished < MIN_FINISHED or self.wall_mean_s <= 0:
            return None
        return self.held_mean / self.wall_mean_s


_SHOWN = tuple(f.name for f in fields(RunMember) if f.name != "last_seen")


@dataclass(slots=True)
class Members:
    """Actors and learners by name, with their liveness and the actors that wait for work."""

    # Seconds of silence after which a member is dead and its leases are reissued.
    dead_after_s: float = field(metadata=FIXED)
    # Seconds of silence after which other roles do not wait for a member.
    silent_after_s: float = field(metadata=FIXED)
    # Names of all engines, spares included.
    engines: frozenset[str] = field(default=frozenset(), metadata=FIXED)
    num_playing: int = field(default=0, metadata=FIXED)  # Number of engines that play at once.
    by_name: dict[str, RunMember] = field(default_factory=dict[str, RunMember])
    # Actor -> time at which a request was last not served in full.
    refused: dict[str, float] = field(default_factory=dict[str, float], metadata=VOLATILE)
    # Incarnation -> time at which another process took the name.
    replaced: dict[str, float] = field(default_factory=dict[str, float], metadata=VOLATILE)
    _learners: dict[str, RunMember] = field(default_factory=dict[str, RunMember], metadata=FIXED)

    def after_restore(self) -> None:
        """Rebuild the index of learners."""
        self._learners = {m.name: m for m in self.by_name.values() if m.role == "learner"}

    def hello(self, message: Hello, now: float) -> bool:
        """Register a role; return True if it is a new process with a known name."""
        member = self.by_name.get(message.name)
        is_other = member is not None and member.incarnation not in ("", message.incarnation)
        if is_other and member is not None:
            self.replaced[member.incarnation] = now
        num_restarts = member.num_restarts + is_other if member else 0
        if member is None or is_other:
            member = self._add(message)
        member.incarnation, member.num_restarts = message.incarnation, num_restarts
        member.node = message.node
        member.commit = message.commit
        member.version = message.version
        self.touch(member, now)
        return is_other

    def heartbeat(self, message: Heartbeat, now: float) -> RunMember:
        """Record the state of a role. An unknown one is registered: this process was restarted."""
        member = self.by_name.get(message.name) or self._add(message)
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

    def absent_envs(self) -> set[str]:
        """Return the environments that no live actor can play."""
        absent: set[str] | None = None
        for member in self.by_name.values():
            if member.role == "actor" and not member.is_dead:
                if not member.absent:
                    return set()
                absent = {*member.absent} if absent is None else absent & {*member.absent}
        return absent or set()

    def _add(self, message: Hello | Heartbeat) -> RunMember:
        """Add a role to the list; a role of the same name is replaced."""
        member = RunMember(role=message.role, name=message.name, incarnation="", version=0)
        self.by_name[member.name] = member
        self._learners.pop(member.name, None)
        if member.role == "learner":
            self._learners[member.name] = member
        return member

    def finished(
        self, name: str, *, wall_s: float, num_held: int, usual_s: float | None = None
    ) -> None:
        """Record a finished episode of an actor.

        Args:
            wall_s: seconds of the episode.
            num_held: episodes that the actor held when it ended, this one included.
            usual_s: median seconds of such episodes over all actors; None: not known.
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
        """Record that an actor got less than it can play. It keeps its turn if it got nothing."""
        if has_some:
            self.refused.pop(name, None)
        self.refused[name] = now

    def satisfy(self, name: str) -> None:
        """Record that an actor got all that it requested."""
        self.refused.pop(name, None)

    def first_refused(self, name: str, now: float) -> str:
        """Return the other actor that has waited for work longest; "" if there is none."""
        late = list[str]()
        longest_waiting = ""
        for other, refused_at in self.refused.items():
            if now - refused_at > REFUSED_S:
                late.append(other)
            elif other != name:
                longest_waiting = other
                break
        for other in late:
            del self.refused[other]
        return longest_waiting

    def is_spare(self, member: RunMember, now: float) -> bool:
        """Return whether an actor is a spare. It starts to play if too few engines play.

        Example (one actor, one spare): actor-0 asks first and plays, actor-1 is a spare. actor-0
        sends nothing for 5 heartbeats -> actor-1 plays. actor-0 comes back and is a spare.
        """
        if member.name not in self.engines or member.is_playing:
            return False
        since = now - self.silent_after_s
        engines = [self.by_name[name] for name in self.engines if name in self.by_name]
        playing = [m for m in engines if m.is_playing and not m.is_dead and m.last_seen >= since]
        member.is_playing = len(playing) < self.num_playing
        return not member.is_playing

    def touch(self, member: RunMember, now: float) -> None:
        """Record a message of a member."""
        member.last_seen = now
        member.is_dead = member.is_silent = False

    def touch_all(self, now: float) -> None:
        """Reset the silence of all members: times of an earlier process are not valid here."""
        for member in self.by_name.values():
            member.last_seen = now

    def leave(self, message: Goodbye, now: float) -> bool:
        """Mark a member as left; False if it is not known, or is another process."""
        member = self.by_name.get(message.name)
        if member is None or member.incarnation not in ("", message.incarnation):
            return False
        member.incarnation, member.is_dead = message.incarnation, True
        member.last_seen = now
        self.satisfy(member.name)
        return True

    def silent(self, now: float) -> list[str]:
        """Return the incarnations of actors that left, died, were replaced, or are silent."""
        since = now - self.silent_after_s
        actors = [m for m in self.by_name.values() if m.role == "actor" and m.incarnation]
        gone = [m.incarnation for m in actors if m.is_dead or m.last_seen < since]
        return [*self.replaced, *gone]

    def newly_silent(self, now: float) -> list[RunMember]:
        """Return the newly silent actors, unless all actors are silent."""
        actors = [m for m in self.by_name.values() if m.role == "actor" and not m.is_dead]
        late = [m for m in actors if now - m.last_seen > self.silent_after_s]
        silent = [m for m in late if not m.is_silent] if len(late) < len(actors) else []
        for member in silent:
            member.is_silent = True
        return silent

    def expire(self, now: float) -> list[RunMember]:
        """Mark silent members as dead; return those newly dead.

        Members that are silent for `FORGET_S` seconds are removed.
        """
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

    def alive(self, role: str) -> list[RunMember]:
        """Return the living members of a role."""
        members = self._learners if role == "learner" else self.by_name
        return [m for m in members.values() if m.role == role and not m.is_dead]

    def is_alive(self, name: str) -> bool:
        """Return whether a member of this name is alive."""
        return name in self.by_name and not self.by_name[name].is_dead

    def is_learner_away(self, now: float) -> bool:
        """Return whether there was a learner, and all learners are dead or silent now."""
        learners = self._learners.values()
        since = now - self.silent_after_s
        return bool(learners) and all(m.is_dead or m.last_seen < since for m in learners)

    def has_other_actor(self, member: RunMember) -> bool:
        """Return whether another actor is alive."""
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
