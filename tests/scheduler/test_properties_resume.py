"""A scheduler restarted at any point equals an uninterrupted one."""

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config.eval import EvalSection
from common.config.train import TrainMode
from common.wire.messages import GroupArrived, LeaseGrant, Outcome, Outcomes, Progress
from scheduler.components import build_components
from scheduler.core import SchedulerCore
from scheduler.episodes.table import EpisodePhase, GroupState
from tests.configs import edited
from tests.scheduler.builders import (
    CATALOGUE,
    Clock,
    beat_of,
    done_of,
    hello_of,
    make_config,
    outcome_of,
    request_of,
    seen_of,
)

ACTORS = ("actor-0", "actor-1", "actor-2")


class Life:
    """Roles that act by dice and by the answers they receive."""

    def __init__(self, seed: int, core: SchedulerCore) -> None:
        self.dice = random.Random(seed)
        self.core = core
        self.version = 0
        self.playing: dict[str, dict[str, Any]] = {name: {} for name in ACTORS}

    def next_message(self) -> tuple[str, Any]:
        """Return (sender, message); the learner reads the state."""
        name = self.dice.choice(ACTORS)
        match self.dice.randrange(9):
            case 0:
                incarnation = f"i{self.dice.random() < 0.1}"
                return name, hello_of(name, incarnation)
            case 1 | 2:
                num = self.dice.randrange(1, 12)
                return name, request_of(name, num, version=self.version)
            case 3:
                return name, beat_of(name, list(self.playing[name]), version=self.version)
            case 4 | 5 | 6:
                return "learner-0", self._arrivals(name)
            case 7:
                return "learner-0", beat_of("learner-0", [], version=self.version)
        return "learner-0", self._step()

    def _arrivals(self, name: str) -> Outcomes:
        held = self.playing[name]
        leases = [held.pop(key) for key in list(held)[: self.dice.randrange(1, 9)]]
        arrived = {lease.episode_id for lease in leases}
        waits = (EpisodePhase.QUEUED, EpisodePhase.LEASED)
        groups: list[GroupArrived] = []
        outcomes = []
        for group in self.core.lifecycle.table.groups.values():
            waiting = {e.episode_id for e in group.episodes if e.state in waits}
            if group.state is GroupState.OPEN and group.number >= 0 and waiting <= arrived:
                is_ready = self.dice.random() < 0.7
                groups.append(GroupArrived(group_id=group.group_id, is_ready=is_ready))
                if not is_ready:
                    ids = [e.episode_id for e in group.episodes if e.settled is None]
                    outcomes += [outcome_of(each, Outcome.FILTERED) for each in ids]
        seen = [seen_of(lease) for lease in leases]
        return Outcomes(seen=seen, outcomes=outcomes, groups=groups)

    def _step(self) -> Any:
        groups = self.core.lifecycle.table.groups.values()
        ready = [group for group in groups if group.state is GroupState.READY][:2]
        ids = [e.episode_id for group in ready for e in group.episodes if e.settled is None]
        if ids:
            outcomes = [outcome_of(each, Outcome.TRAINED) for each in ids]
            return Outcomes(outcomes=outcomes)
        self.version += 1
        ahead, wait_s = self.dice.randrange(3), self.dice.random()
        return done_of(self.version, ahead=ahead, busy_s=1.0, wait_s=wait_s)

    def hear(self, name: str, answer: Any) -> None:
        """Apply the answer to an actor."""
        if isinstance(answer, LeaseGrant):
            self.playing[name].update({lease.episode_id: lease for lease in answer.leases})
        if isinstance(answer, Progress) and name in self.playing:
            for episode_id in answer.revoked:
                self.playing[name].pop(episode_id, None)


def _new_core(mode: TrainMode, clock: Clock) -> SchedulerCore:
    evaluation = EvalSection(before=False, after=False, every_steps=3, stream_items=4)
    cfg = make_config(mode=mode, size=3, num_steps=1_000, max_ahead_steps=2, evaluation=evaluation)
    cfg = edited(cfg, {"groups.straggler_factor": 1.0, "groups.straggler_min_s": 3.0})
    return SchedulerCore(build_components(cfg, CATALOGUE), clock=clock)


def _restarted(core: SchedulerCore, mode: TrainMode, clock: Clock) -> SchedulerCore:
    state = json.loads(json.dumps(core.snapshot(with_volatile=True)))
    other = _new_core(mode, clock)
    other.restore(state)
    return other


SEEDS = st.integers(0, 2**32)
RESTARTS = st.sets(st.integers(0, 199), max_size=12)
MODES = st.sampled_from(list(TrainMode))


@pytest.mark.slow
@settings(max_examples=12)
@given(SEEDS, RESTARTS, MODES)
def test_resume_at_any_point_equals_no_restart(
    seed: int, restarts: set[int], mode: TrainMode
) -> None:
    check_resume(seed, restarts, mode)


@pytest.mark.slow
@pytest.mark.long
@settings(max_examples=100)
@given(SEEDS, RESTARTS, MODES)
def test_resume_at_many_points_equals_no_restart(
    seed: int, restarts: set[int], mode: TrainMode
) -> None:
    check_resume(seed, restarts, mode)


def check_resume(seed: int, restarts: set[int], mode: TrainMode) -> None:
    """Check that a scheduler with restarts before these messages answers as one without."""
    clock = Clock()
    straight = _new_core(mode, clock)
    restarted = _new_core(mode, clock)
    life = Life(seed, straight)
    for name in (*ACTORS, "learner-0"):
        hello = hello_of(name, "iFalse")
        assert straight.handle(name, hello) == restarted.handle(name, hello)
    for number in range(200):
        if number in restarts:
            restarted = _restarted(restarted, mode, clock)
        clock.now += life.dice.choice([0.1, 0.4, 1.0, 4.0])
        name, message = life.next_message()
        answer = straight.handle(name, message)
        assert restarted.handle(name, message) == answer
        life.hear(name, answer)
        assert straight.tick() == restarted.tick()
    assert restarted.snapshot(with_volatile=True) == straight.snapshot(with_volatile=True)
