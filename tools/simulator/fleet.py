"""The simulated actors: they request leases, play, deliver, fail, restart, join and leave."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from common.config.train import TrainMode
from common.wire.messages import (
    EndReason,
    EpisodeKind,
    Goodbye,
    Heartbeat,
    Hello,
    Lease,
    LeaseGrant,
    LeaseRequest,
)
from scheduler.core import RETRY_S, SchedulerCore
from tools.simulator.config import SimulatorConfig
from tools.simulator.workload import SimulatedEpisode, Workload, num_engines

START_S = 1000.0  # A non-zero start, as real clocks have.
GATHER_S = 0.02  # Freed slots are collected for this time before one request is sent.


class EventQueue:
    """The clock of a simulation and the heap of its events. Equal times are in order of entry."""

    def __init__(self) -> None:
        self.clock_s = START_S
        self._events: list[tuple[float, int, Callable[..., Any], tuple[Any, ...]]] = []
        self._num_entered = 0

    def __call__(self) -> float:
        """Return the virtual time, as the scheduler's clock."""
        return self.clock_s

    @property
    def now_s(self) -> float:
        return self.clock_s - START_S

    def at(self, after_s: float, action: Callable[..., Any], *args: Any) -> None:
        """Schedule `action(*args)` after `after_s` seconds."""
        self._num_entered += 1
        heapq.heappush(self._events, (self.clock_s + after_s, self._num_entered, action, args))

    def run_until(self, end_s: float, *, is_over: Callable[[], bool]) -> None:
        """Execute the events up to `end_s`, or until `is_over` returns True after an event."""
        events = self._events
        while events and events[0][0] - START_S <= end_s:
            self.clock_s, _, action, args = heapq.heappop(events)
            action(*args)
            if is_over():
                return
        if events:
            self.clock_s = START_S + end_s


@dataclass(slots=True, kw_only=True)
class SimActor:
    """One simulated actor. Its episodes are lost when it fails."""

    name: str
    slowness: float  # Factor on the seconds of an episode.
    num_slots: int  # Most episodes at once.
    num_lives: int = 0
    is_alive: bool = False
    is_asking: bool = False  # A request is scheduled.
    leases: dict[str, Lease] = field(default_factory=dict)
    busy_since_s: float = -1.0  # Start of the current busy period; -1: it is idle.
    busy_s: float = 0.0  # Seconds with at least one episode.


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """An episode on its way to the learner."""

    lease: Lease
    play: SimulatedEpisode
    actor: str
    end_reason: EndReason
    started_s: float
    ended_s: float
    version: int  # Version of the weights at its start.


class Fleet:
    """All simulated actors. A refused actor joins a queue, and the queue is woken on new work.

    A real actor repeats its request every `RETRY_S`. Simulating every repeated request of a
    thousand refused actors would take most of the computing time. Therefore the queue is woken only
    after events that may make work available. It then serves actors until one is refused. A random
    delay before that models the time until the next request of so many real actors.
    """

    def __init__(
        self,
        cfg: SimulatorConfig,
        core: SchedulerCore,
        workload: Workload,
        events: EventQueue,
        *,
        rng: Random,
        deliver: Callable[[Arrival], None],
        note_waiting: Callable[[str], None],
    ) -> None:
        """Create actors that have not joined yet.

        `deliver` receives each finished episode. `note_waiting` reports to the scheduler that an
        actor keeps requesting.
        """
        simulator = cfg.simulator
        self._cfg = cfg
        self._core = core
        self._workload = workload
        self._events = events
        self._rng = rng
        self._deliver = deliver
        self._note_waiting = note_waiting
        self._is_sync = cfg.train.mode is TrainMode.SYNC
        # Prepared episodes of incomplete groups, by group id.
        self._plays: dict[str, list[SimulatedEpisode]] = {}
        self._waiting: dict[str, SimActor] = {}  # Refused actors, in order of refusal.
        self._is_waking = False
        self._max_wakes = 4 * cfg.groups.per_step + 8
        self.version = 0
        self.num_deaths = 0
        num = num_engines(cfg)
        self.actors = [
            SimActor(
                name=f"actor-{i}",
                slowness=rng.lognormvariate(0.0, simulator.speed_sigma),
                num_slots=cfg.actor.max_concurrent,
            )
            for i in range(num)
        ]
        for i, actor in enumerate(self.actors):
            events.at(simulator.join_s * i / num, self._join, actor)

    # --- joining and dying --------------------------------------------------------------------

    def add(self, actor: SimActor) -> None:
        """Let one more actor join now."""
        self.actors.append(actor)
        self._join(actor)

    def leave(self, actor: SimActor, *, is_announced: bool = True) -> None:
        """Let an actor leave for good. A node that is lost announces nothing."""
        self._stop(actor)
        if is_announced:
            incarnation = f"life-{actor.num_lives}"
            goodbye = Goodbye(role="actor", name=actor.name, incarnation=incarnation)
            self._core.handle(actor.name, goodbye)
            self.wake()

    def _join(self, actor: SimActor) -> None:
        """Start an actor: it registers and requests leases."""
        actor.num_lives += 1
        actor.is_alive = True
        incarnation = f"life-{actor.num_lives}"
        hello = Hello(role="actor", name=actor.name, incarnation=incarnation, version=self.version)
        self._core.handle(actor.name, hello)
        if self._cfg.simulator.mtbf_h > 0:
            life_s = self._rng.expovariate(1 / (3600.0 * self._cfg.simulator.mtbf_h))
            self._events.at(life_s, self._fail, actor)
        self._ask(actor)
        self.wake()

    def _fail(self, actor: SimActor) -> None:
        """End an actor with its episodes; it restarts later."""
        if not actor.is_alive:  # It has left.
            return
        self.num_deaths += 1
        self._stop(actor)
        self._events.at(self._cfg.simulator.restart_s, self._join, actor)

    def _stop(self, actor: SimActor) -> None:
        """Drop the episodes of an actor that ends."""
        actor.leases.clear()
        self._note_idle(actor)
        actor.is_alive = False
        self._waiting.pop(actor.name, None)

    def beat_and_list(self) -> list[str]:
        """Return the names of live actors. Those with revocable episodes send a heartbeat."""
        living = [actor for actor in self.actors if actor.is_alive]
        if self._cfg.groups.straggler_factor > 0:
            for actor in living:
                if actor.leases:
                    self._send_heartbeat(actor)
        return [actor.name for actor in living]

    def _send_heartbeat(self, actor: SimActor) -> None:
        """Send a heartbeat, and drop the revoked episodes."""
        heartbeat = Heartbeat(
            role="actor",
            name=actor.name,
            version=self.version,
            running=list(actor.leases),
            num_slots=actor.num_slots,
        )
        progress = self._core.handle(actor.name, heartbeat)
        for episode_id in progress.revoked:
            actor.leases.pop(episode_id, None)
        if progress.revoked:
            self._note_idle(actor)
            self._ask_soon(actor)

    # --- asking -------------------------------------------------------------------------------

    def _ask_soon(self, actor: SimActor) -> None:
        """Schedule a request for leases, unless one is scheduled."""
        if not actor.is_asking:
            actor.is_asking = True
            self._events.at(GATHER_S, self._ask, actor)

    def _ask(self, actor: SimActor) -> LeaseGrant | None:
        """Request leases for all free slots. An actor that gets fewer joins the queue."""
        actor.is_asking = False
        num_free = actor.num_slots - len(actor.leases)
        if not actor.is_alive or num_free <= 0 or (self._is_sync and actor.leases):
            return None
        request = LeaseRequest(actor=actor.name, num_free_slots=num_free, version=self.version)
        grant: LeaseGrant = self._core.handle(actor.name, request)
        if grant.leases:
            self._start(actor, grant.leases)
            self._waiting.pop(actor.name, None)
        if len(grant.leases) < num_free:
            self._waiting.setdefault(actor.name, actor)
        else:
            self._waiting.pop(actor.name, None)
        return grant

    def wake(self) -> None:
        """Schedule new requests of the refused actors, because work may be available."""
        if self._waiting and not self._is_waking:
            self._is_waking = True
            delay_s = RETRY_S * self._rng.random() / len(self._waiting)
            self._events.at(delay_s, self._wake_waiting)

    def _wake_waiting(self) -> None:
        """Repeat the requests of refused actors until one gets nothing."""
        self._is_waking = False
        waiting = list(self._waiting.values())[: self._max_wakes]
        for i, actor in enumerate(waiting):
            if i + 1 < len(waiting):
                self._note_waiting(waiting[i + 1].name)
            grant = self._ask(actor)
            if grant is None or grant.leases:
                continue
            if not grant.reason.startswith(("speed:", "turn:")):
                break
            # Move this actor to the end of the queue, so that the next attempt serves another one.
            self._waiting[actor.name] = self._waiting.pop(actor.name)

    # --- playing ------------------------------------------------------------------------------

    def _start(self, actor: SimActor, leases: list[Lease]) -> None:
        """Start the leased episodes, and schedule their ends."""
        simulator = self._cfg.simulator
        now = self._events.now_s
        if not actor.leases:
            actor.busy_since_s = now
        num_others = len(actor.leases) + len(leases) - 1
        factor = actor.slowness * (1.0 + simulator.slot_slowdown * num_others)
        for lease in leases:
            play = self._play_of(lease)
            seconds = factor * play.wall_s
            end_reason = play.end_reason
            if simulator.failed_frac and self._rng.random() < simulator.failed_frac:
                seconds = seconds * self._rng.random()
                end_reason = EndReason.ENV_ERROR
            elif seconds > lease.deadline_s:
                seconds = lease.deadline_s
                end_reason = EndReason.DEADLINE
            actor.leases[lease.episode_id] = lease
            arrival = Arrival(
                lease=lease,
                play=play,
                actor=actor.name,
                end_reason=end_reason,
                started_s=now,
                ended_s=now + seconds,
                version=self.version,
            )
            self._events.at(seconds, self._finish, actor, arrival)

    def _play_of(self, lease: Lease) -> SimulatedEpisode:
        """Return the result of a leased episode; members of a group have a common draw."""
        is_train = lease.kind is EpisodeKind.TRAIN
        plays = self._plays.get(lease.group_id) if is_train else None
        if plays is None:
            plays = self._workload.group(
                self._rng,
                horizon=lease.horizon,
                stage=lease.horizon_stage,
                version=lease.opened_at_version,
                size=self._cfg.groups.size,
            )
            if is_train:
                self._plays[lease.group_id] = plays
        return plays[lease.member if is_train else 0]

    def forget(self, group_id: str) -> None:
        """Discard the prepared episodes of a complete group."""
        self._plays.pop(group_id, None)

    def _finish(self, actor: SimActor, arrival: Arrival) -> None:
        """Deliver an ended episode, and request a lease for its slot."""
        if actor.leases.get(arrival.lease.episode_id) is not arrival.lease:
            return  # The lease was revoked, or the actor failed.
        del actor.leases[arrival.lease.episode_id]
        self._note_idle(actor)
        self._deliver(arrival)
        self._ask_soon(actor)

    def _note_idle(self, actor: SimActor) -> None:
        """Add the busy time of an actor whose last episode has ended."""
        if actor.is_alive and not actor.leases and actor.busy_since_s >= 0:
            actor.busy_s += self._events.now_s - actor.busy_since_s
            actor.busy_since_s = -1.0

    def busy_s(self) -> float:
        """Return the total seconds in which each actor had at least one episode."""
        now = self._events.now_s
        return sum(a.busy_s + (now - a.busy_since_s if a.leases else 0.0) for a in self.actors)
