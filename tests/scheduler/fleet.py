"""A run on virtual time: actors of given speeds, a learner of given seconds per step."""

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from common.config.run_config import RunConfig
from common.wire.messages import GroupArrived, Lease, Outcome, StepDone
from scheduler.episodes.table import EpisodePhase, GroupState
from tests.scheduler.builders import Table, outcome_of, seen_of

BEAT_S = 1.0
RETRY_S = 0.1


@dataclass
class SimActor:
    """Plays up to `num_slots` episodes at once; each takes `wall_s`."""

    name: str
    wall_s: Callable[[int], float]  # Seconds of an episode by the number of concurrent ones.
    num_slots: int = 64
    joins_at_s: float = 0.0
    held: dict[str, Lease] = field(default_factory=dict)
    num_started: int = 0
    num_finished: int = 0


class Fleet:
    """Drives a scheduler with its roles; its measurements are public."""

    def __init__(self, cfg: RunConfig, actors: list[SimActor], *, busy_s: float) -> None:
        self.table = Table(cfg)
        self.cfg = cfg
        self.actors = actors
        self.busy_s = busy_s
        self.version = 0
        self.lags: Counter[tuple[str, int]] = Counter()  # (actor, lag at consumption)
        self.num_waits = 0  # times that the learner found no batch
        self.wait_s = 0.0
        self.max_held: Counter[str] = Counter()
        self._born: dict[str, tuple[str, int]] = {}  # episode -> (actor, version at its start)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._free_at = self.table.clock.now  # The learner waits from here.
        self._is_busy = False
        self._started_at = self.table.clock.now
        self.table.hello("learner-0")
        for actor in actors:
            self._at(actor.joins_at_s, lambda actor=actor: self._join(actor))

    @property
    def now_s(self) -> float:
        return self.table.clock.now - self._started_at

    def _at(self, after_s: float, action: Callable[[], None]) -> None:
        self._num_events += 1
        event = (self.table.clock.now + after_s, self._num_events, action)
        heapq.heappush(self._events, event)

    def run(self, seconds: float) -> None:
        """Let virtual time pass."""
        end = self.table.clock.now + seconds
        while self._events and self._events[0][0] <= end:
            self.table.clock.now, _, action = heapq.heappop(self._events)
            action()
            self.table.core.tick()
        self.table.clock.now = end

    def _join(self, actor: SimActor) -> None:
        self.table.hello(actor.name, version=self.version)
        self._ask(actor)
        self._beat(actor)

    def _beat(self, actor: SimActor) -> None:
        self.table.beat("learner-0", [], version=self.version)
        for episode_id in self.table.beat(actor.name, list(actor.held)).revoked:
            actor.held.pop(episode_id, None)
        self._at(BEAT_S, lambda: self._beat(actor))

    def _ask(self, actor: SimActor) -> None:
        num_free = actor.num_slots - len(actor.held)
        leases = self.table.ask(actor.name, num_free, self.version).leases if num_free else []
        for lease in leases:
            actor.held[lease.episode_id] = lease
            actor.num_started += 1
            self._born[lease.episode_id] = (actor.name, self.version)
        self.max_held[actor.name] = max(self.max_held[actor.name], len(actor.held))
        wall_s = actor.wall_s(max(1, len(actor.held)))
        for lease in leases:
            self._at(wall_s, lambda lease=lease: self._finish(actor, lease, wall_s))
        self._at(RETRY_S, lambda: self._ask(actor))

    def _finish(self, actor: SimActor, lease: Lease, wall_s: float) -> None:
        if actor.held.pop(lease.episode_id, None) is None:
            return  # it was revoked
        actor.num_finished += 1
        self.table.report(seen=[replace(seen_of(lease), wall_s=wall_s)])
        group = self.table.core.lifecycle.table.groups.get(lease.group_id)
        waits = (EpisodePhase.QUEUED, EpisodePhase.LEASED)
        if group and not any(each.state in waits for each in group.episodes):
            self.table.report(groups=[GroupArrived(group_id=group.group_id, is_ready=True)])
        self._maybe_train()

    def _maybe_train(self) -> None:
        groups = self.table.core.lifecycle.table.groups.values()
        ready = [group for group in groups if group.state is GroupState.READY]
        if self._is_busy or len(ready) < self.cfg.groups.per_step:
            return
        batch = ready[: self.cfg.groups.per_step]
        wait_s = self.table.clock.now - self._free_at
        self.num_waits += wait_s > 0
        self.wait_s += wait_s
        for group in batch:
            for episode in group.episodes:
                actor, version = self._born[episode.episode_id]
                self.lags[actor, self.version - version] += 1
        self._is_busy = True
        ids = [e.episode_id for g in batch for e in g.episodes if e.settled is None]
        self._at(self.busy_s, lambda: self._step(ids, wait_s))

    def _step(self, ids: list[str], wait_s: float) -> None:
        self._is_busy = False
        self._free_at = self.table.clock.now
        self.version += 1
        self.table.report(outcomes=[outcome_of(each, Outcome.TRAINED) for each in ids])
        done: Any = StepDone(
            version=self.version,
            is_last=False,
            max_ahead_steps=self.cfg.scheduler.max_ahead_steps,
            signals={"busy_s": self.busy_s, "wait_s": wait_s},
        )
        self.table.core.handle("learner-0", done)
        self._maybe_train()

    def stale_frac(self, name: str, *, max_lag_steps: int) -> float:
        """Share of an actor's consumed episodes that were older than that."""
        total = sum(num for (actor, _), num in self.lags.items() if actor == name)
        late = sum(n for (a, lag), n in self.lags.items() if a == name and lag > max_lag_steps)
        return late / max(total, 1)
