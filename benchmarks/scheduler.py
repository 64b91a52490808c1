"""The suite `scheduler`: leases per second of its state machine on one core."""

import time
from collections import defaultdict
from typing import Any

from benchmarks.suite import Suite
from common.config.load import load_config
from common.config.run_config import RunConfig
from common.wire.messages import (
    EndReason,
    EpisodeOutcome,
    EpisodeSeen,
    GroupArrived,
    Heartbeat,
    Hello,
    Lease,
    LeaseRequest,
    Outcome,
    Outcomes,
    StepDone,
)
from scheduler.components import build_components
from scheduler.core import SchedulerCore
from tools.simulator.workload import catalogue_of

LEARNER = "learner-0"
MIN_LEASES_PER_S = 5_000.0
NUM_ACTORS = 1_000
NUM_STEPS = 6
EPISODE_S = 4.0
LEGEND = (
    "Leases that are granted, listed in a heartbeat, arrive and are trained on, per second of\n"
    "processor time, without sockets."
)


def run_suite(suite: Suite) -> None:
    """Measure for some seconds."""
    suite.title(LEGEND)
    leases_per_s = measure_core(num_actors=NUM_ACTORS, num_steps=NUM_STEPS)
    name = f"leases served by the core, {NUM_ACTORS} actors"
    suite.at_least(name, leases_per_s, "per s", MIN_LEASES_PER_S)


def measure_core(*, num_actors: int, num_steps: int) -> float:
    """Return the leases per second of processor time, from request to the end of their step."""
    cfg = bench_config()
    core = SchedulerCore(build_components(cfg, catalogue_of(cfg)), clock=time.monotonic)
    learner = BenchLearner(group_size=cfg.groups.size, per_step=cfg.groups.per_step)
    actors = [f"actor-{i}" for i in range(num_actors)]
    for role, name in [("learner", LEARNER), *(("actor", actor) for actor in actors)]:
        core.handle(name, Hello(role=role, name=name, incarnation="life-1", version=0))
    started = time.process_time()
    while learner.version < num_steps:
        for actor in actors:
            for lease in _play(core, actor, learner.version):
                learner.arrive(lease)
            for message in learner.messages():
                core.handle(LEARNER, message)
    return learner.num_arrived / (time.process_time() - started)


def bench_config() -> RunConfig:
    """Return a run that never ends, with room for an episode of every actor."""
    overrides = (
        "train.num_steps=1000000",
        "eval.before=false",
        "eval.after=false",
        "groups.size=8",
        "groups.per_step=64",
        "scheduler.max_ahead_steps=7",
        "scheduler.gate_margin=0",
    )
    return load_config("quickstart", overrides)


def _play(core: SchedulerCore, actor: str, version: int) -> list[Lease]:
    """Request a lease, and list it once in a heartbeat."""
    request = LeaseRequest(actor=actor, num_free_slots=1, version=version)
    leases: list[Lease] = core.handle(actor, request).leases
    running = [lease.episode_id for lease in leases]
    core.handle(actor, Heartbeat(role="actor", name=actor, version=version, running=running))
    return leases


class BenchLearner:
    """Sends a learner's reports: arrived episodes, complete groups, finished steps.

    Example (groups of 2, 1 a step): arrive(g/0), arrive(g/1) -> messages() reports both, calls g
    ready, trains on it and ends step 1.
    """

    def __init__(self, *, group_size: int, per_step: int) -> None:
        self._group_size = group_size
        self._per_step = per_step
        self._seen: list[EpisodeSeen] = []
        self._groups: defaultdict[str, list[str]] = defaultdict(list)  # Arrived members by group.
        self._ready: list[str] = []
        self._said_ready: list[str] = []
        self.version = 0
        self.num_arrived = 0

    def arrive(self, lease: Lease) -> None:
        """Record the arrival of an episode."""
        self.num_arrived += 1
        self._seen.append(
            EpisodeSeen(
                episode_id=lease.episode_id,
                reward=float(lease.member % 2),
                is_success=lease.member % 2 == 1,
                end_reason=EndReason.DONE,
                num_turns=4,
                wall_s=EPISODE_S,
            )
        )
        members = self._groups[lease.group_id]
        members.append(lease.episode_id)
        if len(members) == self._group_size:
            self._ready.append(lease.group_id)

    def messages(self) -> list[Any]:
        """Return the messages since the last call."""
        groups = [GroupArrived(group_id=group_id, is_ready=True) for group_id in self._ready]
        reports: list[Any] = []
        if self._seen or groups:
            reports.append(Outcomes(seen=self._seen, groups=groups))
        self._said_ready += self._ready
        self._ready = []
        self._seen = []
        while len(self._said_ready) >= self._per_step:
            batch = self._said_ready[: self._per_step]
            del self._said_ready[: self._per_step]
            trained = [
                episode_id for group_id in batch for episode_id in self._groups.pop(group_id)
            ]
            self.version += 1
            outcomes = [
                EpisodeOutcome(episode_id=episode_id, outcome=Outcome.TRAINED, cause="")
                for episode_id in trained
            ]
            done = StepDone(version=self.version, is_last=False, max_ahead_steps=1_000, signals={})
            reports += [Outcomes(outcomes=outcomes), done]
        return reports
