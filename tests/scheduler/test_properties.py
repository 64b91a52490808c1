"""Laws that hold after every event, whatever the order of events."""

import json
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.config.eval import EvalSection
from common.config.train import TrainMode
from common.wire.messages import (
    EndReason,
    EpisodeKind,
    Goodbye,
    GroupArrived,
    Hello,
    Lease,
    Outcome,
)
from scheduler.components import build_components
from scheduler.core import SchedulerCore
from scheduler.dispatch.gate import StalenessThrottle
from scheduler.episodes.table import EpisodePhase, GroupState
from scheduler.evaluation import Phase
from scheduler.state import save
from tests.scheduler.builders import CATALOGUE, Table, ids_in, make_config, outcome_of

ACTORS = ("actor-0", "actor-1", "actor-2")
actors = st.sampled_from(ACTORS)
picks = st.randoms(use_true_random=False)


class RunMachine(RuleBasedStateMachine):
    """Actors that die and come back, a learner that repeats itself, a scheduler that restarts."""

    mode = TrainMode.ASYNC

    def __init__(self) -> None:
        super().__init__()
        evaluation = EvalSection(num_items=3, baselines=False)
        cfg = make_config(
            mode=self.mode, size=3, per_step=2, num_steps=4, max_attempts=2, evaluation=evaluation
        )
        self.cfg = cfg
        self.max_groups = StalenessThrottle(cfg.groups, cfg.scheduler, cfg.train).max_groups_of_step
        self.table = Table(cfg)
        self.playing: dict[str, dict[str, Lease]] = {name: {} for name in ACTORS}
        self.incarnations: dict[str, int] = dict.fromkeys(ACTORS, 0)
        self.finished: list[Lease] = []  # Episodes at the learner, with possible repeats.
        self.stamps: dict[str, tuple] = {}
        self.learner_words: dict[str, Outcome] = {}
        self.version = 0
        self._say_hello("learner", 0)
        for name in ACTORS:
            self._say_hello(name, 0)

    @property
    def core(self) -> SchedulerCore:
        return self.table.core

    def _say_hello(self, name: str, incarnation: int) -> None:
        role = name.partition("-")[0]
        hello = Hello(role=role, name=name, incarnation=f"i{incarnation}", version=0)
        self.core.handle(name, hello)

    # --- actors -------------------------------------------------------------------------------

    @rule(name=actors, num=st.integers(0, 7), is_lost=st.sampled_from([False] * 5 + [True]))
    def ask(self, name: str, num: int, is_lost: bool) -> None:
        grant = self.table.ask(name, num, version=self.version)
        assert len(grant.leases) <= num
        for lease in grant.leases:
            stamp = (lease.horizon_stage, lease.opened_at_version, lease.policy)
            item = (lease.env, lease.item_id, lease.horizon, lease.seed)
            assert self.stamps.setdefault(lease.group_id, stamp) == stamp
            assert self.stamps.setdefault(lease.episode_id, item) == item
            assert lease.attempt < 2
        if not is_lost:  # the answer reached the actor
            self.playing[name].update({lease.episode_id: lease for lease in grant.leases})

    @rule(name=actors)
    def beat(self, name: str) -> None:
        progress = self.table.beat(name, list(self.playing[name]), version=self.version)
        for episode_id in progress.revoked:
            del self.playing[name][episode_id]
        assert progress.is_finished == (self.core.phase is Phase.DONE)

    @rule(name=actors, pick=picks, fails=st.booleans())
    def deliver(self, name: str, pick: Any, fails: bool) -> None:
        if self.playing[name]:
            lease = self.playing[name].pop(pick.choice(sorted(self.playing[name])))
            reason = EndReason.ENV_ERROR if fails and pick.random() < 0.3 else EndReason.DONE
            self.finished.append(lease)
            self.table.arrive([lease], end_reason=reason)

    @rule(name=actors)
    def deliver_all(self, name: str) -> None:
        leases = list(self.playing[name].values())
        self.playing[name] = {}
        self.finished += leases
        self.table.arrive(leases)

    @rule(name=actors)
    def restart_actor(self, name: Any) -> None:
        self.playing[name] = {}
        self.incarnations[name] += 1
        self._say_hello(name, self.incarnations[name])

    @rule(name=actors)
    def leave(self, name: str) -> None:
        """Send a goodbye; the next message makes the actor present again."""
        self.playing[name] = {}
        incarnation = f"i{self.incarnations[name]}"
        self.core.handle(name, Goodbye(role="actor", name=name, incarnation=incarnation))
        assert self.core.lifecycle.leases.of(name) == []

    @rule(seconds=st.sampled_from([0.3, 6.0, 11.0, 2000.0, -500.0, 1e6]))
    def wait(self, seconds: float) -> None:
        """Time passes, or the clock jumps."""
        self.table.clock.now += seconds
        self.core.tick()

    # --- learner ------------------------------------------------------------------------------

    @precondition(lambda self: self.finished)
    @rule(pick=picks)
    def deliver_again(self, pick: Any) -> None:
        lease = pick.choice(self.finished)
        if lease.kind is EpisodeKind.TRAIN:
            self.table.arrive([lease])

    @rule(pick=picks, outcome=st.sampled_from([Outcome.TRAINED, Outcome.FILTERED]))
    def complete_group(self, pick: Any, outcome: Outcome) -> None:
        """As the learner does: once every member has arrived or was given up."""
        for group in list(self.core.lifecycle.table.groups.values()):
            waits = (EpisodePhase.QUEUED, EpisodePhase.LEASED)
            is_train = group.kind is EpisodeKind.TRAIN
            is_due = is_train and not any(e.state in waits for e in group.episodes)
            if is_due and group.state is GroupState.OPEN:
                is_ready = outcome is Outcome.TRAINED
                arrived = [e for e in group.episodes if e.state is EpisodePhase.ARRIVED]
                words = [] if is_ready else [self._word(e.episode_id, outcome) for e in arrived]
                groups = [GroupArrived(group_id=group.group_id, is_ready=is_ready)]
                self.table.report(groups=groups, outcomes=words)
                return

    def _word(self, episode_id: str, outcome: Outcome) -> Any:
        assert self.learner_words.setdefault(episode_id, outcome) is outcome
        return outcome_of(episode_id, outcome)

    @precondition(lambda self: self.core.phase is Phase.TRAIN)
    @rule(is_stale=st.sampled_from([False] * 4 + [True]))
    def train(self, is_stale: bool) -> None:
        table = self.core.lifecycle.table
        ready = [g for g in table.groups.values() if g.state is GroupState.READY]
        if len(ready) < self.cfg.groups.per_step:
            return
        outcome = Outcome.STALE if is_stale else Outcome.TRAINED
        for group in ready[: self.cfg.groups.per_step]:
            arrived = [e for e in group.episodes if e.state is EpisodePhase.ARRIVED]
            self.table.report(outcomes=[self._word(e.episode_id, outcome) for e in arrived])
        if not is_stale:
            self.version += 1
            self.table.step(self.version, is_last=self.version == self.cfg.train.num_steps)

    @precondition(lambda self: self.learner_words)
    @rule(pick=picks)
    def repeat_words(self, pick: Any) -> None:
        chosen = pick.sample(sorted(self.learner_words), min(5, len(self.learner_words)))
        before = save(self.core.lifecycle.ledger)
        words = [outcome_of(episode_id, self.learner_words[episode_id]) for episode_id in chosen]
        self.table.report(outcomes=words)
        assert save(self.core.lifecycle.ledger) == before

    # --- scheduler ----------------------------------------------------------------------------

    @rule(has_log=st.booleans())
    def restart_scheduler(self, has_log: bool) -> None:
        state = json.loads(json.dumps(self.core.snapshot(with_volatile=has_log)))
        core = SchedulerCore(build_components(self.cfg, CATALOGUE), clock=self.table.clock)
        core.restore(state)
        assert core.snapshot(with_volatile=has_log) == state or not has_log
        assert core.snapshot() == self.core.snapshot()
        self.table.core = core

    # --- the laws -----------------------------------------------------------------------------

    @invariant()
    def ledger_balances(self) -> None:
        self.core.lifecycle.assert_balanced()
        assert min(self.core.lifecycle.ledger.train.settled.values()) >= 0

    @invariant()
    def learner_s_words_are_what_is_booked(self) -> None:
        settled = self.core.lifecycle.ledger.train.settled
        for outcome in (Outcome.TRAINED, Outcome.FILTERED):
            said = sum(word is outcome for word in self.learner_words.values())
            assert settled[outcome] == said

    @invariant()
    def lease_has_one_holder(self) -> None:
        leases = self.core.lifecycle.leases
        held = [e for name in ACTORS for e in leases.of(name)]
        assert len({e.episode_id for e in held}) == len(held) == len(leases)
        assert ids_in(self.core, EpisodePhase.LEASED) == {e.episode_id for e in held}
        assert all(e.actor == name for name in ACTORS for e in leases.of(name))

    @invariant()
    def queued_episode_is_in_the_queue(self) -> None:
        pending = {
            f"{group_id}/{member}"
            for group_id, pending in self.core.lifecycle.queue.pending.items()
            for member in pending.members
        }
        assert ids_in(self.core, EpisodePhase.QUEUED) <= pending

    @invariant()
    def groups_of_a_step_are_bounded(self) -> None:
        table = self.core.lifecycle.table
        groups = [g for g in table.groups.values() if g.kind is EpisodeKind.TRAIN]
        assert table.num_open == sum(g.state is GroupState.OPEN for g in groups)
        assert table.num_ready == sum(g.state is GroupState.READY for g in groups)
        ahead = 1 if self.mode is TrainMode.SYNC else self.cfg.scheduler.max_ahead_steps + 1
        assert table.num_open + table.num_ready <= ahead * self.cfg.groups.per_step
        num_filtered = self.core.lifecycle.num_filtered
        if table.num_ready and num_filtered < self.max_groups:  # Otherwise the bound is lifted.
            num_drawn = table.num_open + table.num_ready + num_filtered
            assert num_drawn <= self.max_groups + self.cfg.groups.per_step - 1


class SyncRunMachine(RunMachine):
    """The same in lockstep, where all open groups have one version."""

    mode = TrainMode.SYNC

    @invariant()
    def open_groups_have_one_version(self) -> None:
        groups = self.core.lifecycle.table.groups.values()
        is_open = [g for g in groups if g.kind is EpisodeKind.TRAIN and g.state is GroupState.OPEN]
        assert len({g.opened_at_version for g in is_open}) <= 1


LIMITS = settings(max_examples=16, stateful_step_count=60)
TestAsyncLawsHold = pytest.mark.slow(RunMachine.TestCase)
TestAsyncLawsHold.settings = LIMITS
TestSyncLawsHold = pytest.mark.slow(SyncRunMachine.TestCase)
TestSyncLawsHold.settings = LIMITS


class ManyAsyncRunsMachine(RunMachine):
    """The same in more random runs."""


class ManySyncRunsMachine(SyncRunMachine):
    """The same in more random runs."""


MORE = settings(max_examples=120, stateful_step_count=60)
TestAsyncLawsHoldInManyRuns = pytest.mark.long(ManyAsyncRunsMachine.TestCase)
TestAsyncLawsHoldInManyRuns.settings = MORE
TestSyncLawsHoldInManyRuns = pytest.mark.long(ManySyncRunsMachine.TestCase)
TestSyncLawsHoldInManyRuns.settings = MORE
