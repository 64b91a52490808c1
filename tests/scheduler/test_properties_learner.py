"""Laws of scheduler and learner together: the real group table at the other end of the wire."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.config.algorithm import AlgorithmSection
from common.ids import is_below, split_episode_id
from common.wire.messages import (
    EndReason,
    EpisodeOutcome,
    EpisodeSeen,
    GroupArrived,
    Lease,
    Outcome,
    Progress,
    Trajectory,
)
from learner.ingest.buffer import GroupAssembly, oldest_version
from learner.ingest.journal_index import FROM_THE_START, JournalIndex
from learner.journal.journal import JournalPosition
from scheduler.components import build_components
from scheduler.core import SchedulerCore
from scheduler.episodes.audit import ENDED
from scheduler.episodes.table import EpisodePhase
from tests.configs import edited
from tests.learner.builders import held_by
from tests.scheduler.builders import CATALOGUE, Table, ids_in, make_config, outcome_of, seen_of
from tests.scheduler.learner_side import has_signal, trajectory_of

ACTORS = ("actor-0", "actor-1", "actor-2")
MAX_LAG_STEPS, MAX_STRETCH = 1, 3.0
actors = st.sampled_from(ACTORS)
picks = st.randoms(use_true_random=False)


class TwoSidesMachine(RuleBasedStateMachine):
    """Any role may die at any time; files (journal, step log, state) remain."""

    def __init__(self) -> None:
        super().__init__()
        cfg = make_config(size=3, per_step=1, num_steps=1_000, max_attempts=2, max_ahead_steps=2)
        cfg = edited(
            cfg,
            {
                "groups.straggler_factor": 2.0,
                "groups.straggler_min_s": 5.0,
                "learner.max_lag_steps": MAX_LAG_STEPS,
                "scheduler.max_stretch": MAX_STRETCH,
            },
        )
        self.cfg = cfg
        self.table = Table(cfg)
        self.playing: dict[str, dict[str, tuple[Lease, int]]] = {name: {} for name in ACTORS}
        self.incarnations: dict[str, int] = dict.fromkeys((*ACTORS, "learner-0"), 0)
        self.delivered: list[Trajectory] = []
        self.journal: list[Trajectory] = []
        self.checkpoints = [0]  # versions that may be restored
        self.replay_point = FROM_THE_START
        self.logged: list[list[EpisodeOutcome]] = []  # the step log
        self.trained: set[str] = set()
        self.stamps: dict[str, tuple[Any, ...]] = {}
        self.version = 0
        for name in ("learner-0", *ACTORS):
            self._hello(name)
        self._start_learner()
        for horizon in [5] * 20 + [8] * 20:  # it has run for a while
            self.core.parts.pace.add_episode("maze", horizon, 25.0)

    @property
    def core(self) -> SchedulerCore:
        return self.table.core

    def _hello(self, name: str) -> None:
        self.table.hello(name, incarnation=f"i{self.incarnations[name]}", version=self.version)

    # --- actors -------------------------------------------------------------------------------

    @rule(name=actors, num=st.integers(1, 6), is_lost=st.sampled_from([False] * 5 + [True]))
    def ask(self, name: str, num: int, is_lost: bool) -> None:
        held = {e.episode_id for other in ACTORS for e in self.core.lifecycle.leases.of(other)}
        for lease in self.table.ask(name, num, version=self.version).leases:
            assert lease.episode_id not in held  # No other actor plays it.
            stamp = (lease.horizon, lease.horizon_stage, lease.item_id, lease.opened_at_version)
            assert self.stamps.setdefault(lease.group_id, stamp) == stamp
            if not is_lost:
                self.playing[name][lease.episode_id] = (lease, self.version)

    @rule(name=actors, pick=picks, num_left=st.integers(0, 2))
    def play(self, name: str, pick: Any, num_left: int) -> None:
        """A round of work, all but the last ones of it."""
        self.ask(name, 9, is_lost=False)
        self.deliver(name, max(1, len(self.playing[name]) - num_left), pick)

    @rule(name=actors)
    def beat(self, name: str) -> None:
        for episode_id in self.table.beat(name, list(self.playing[name]), self.version).revoked:
            self.playing[name].pop(episode_id, None)

    @rule(name=actors, num=st.integers(1, 9), pick=picks)
    def deliver(self, name: str, num: int, pick: Any) -> None:
        for _ in range(min(num, len(self.playing[name]))):
            lease, version = self.playing[name].pop(pick.choice(sorted(self.playing[name])))
            failed = 0.4 < pick.random() < 0.5
            trajectory = trajectory_of(
                lease,
                version=version,
                reward=float((lease.member + pick.randrange(2)) % 2),
                end_reason=EndReason.ENV_ERROR if failed else EndReason.DONE,
                actor=name,
            )
            self.delivered.append(trajectory)
            self._accept(trajectory)

    @precondition(lambda self: self.delivered)
    @rule(pick=picks)
    def deliver_again(self, pick: Any) -> None:
        self._accept(pick.choice(self.delivered))

    @rule(name=actors)
    def restart_actor(self, name: str) -> None:
        self.playing[name] = {}
        self.incarnations[name] += 1
        self._hello(name)

    @rule(seconds=st.sampled_from([0.3, 0.3, 6.0, 11.0, 2000.0, -400.0, 1e6]))
    def wait(self, seconds: float) -> None:
        """Time passes, or the clock jumps."""
        self.table.clock.now += seconds
        self.core.tick()

    @rule(seconds=st.sampled_from([6.0, 60.0]))
    def wait_with_heartbeats(self, seconds: float) -> None:
        """Long enough for stragglers; the second heartbeat has let go of them."""
        for _ in range(2):
            self.table.clock.now += seconds / 2
            self.beat_of_learner()
            for name in ACTORS:
                self.beat(name)
        self.core.tick()

    # --- learner ------------------------------------------------------------------------------

    def _tell(
        self,
        seen: Sequence[EpisodeSeen] = (),
        outcomes: Sequence[EpisodeOutcome] = (),
        groups: Sequence[GroupArrived] = (),
        *,
        only_remember: bool = False,
    ) -> None:
        report = {"seen": list(seen), "outcomes": list(outcomes), "groups": list(groups)}
        self.history.append(report)
        if not only_remember:
            self._hear(self.table.report(**report))

    def _hear(self, progress: Progress | None) -> None:
        if progress is not None:
            self.groups.decide(progress.learner_version, progress.num_batch_groups)

    def _adopt(self, trajectory: Trajectory, offset: int, *, only_remember: bool = False) -> None:
        self.index.add_episode(trajectory)
        self._tell(seen=[self._seen(trajectory)], only_remember=only_remember)
        self.index.add_entry(
            trajectory, JournalPosition(offset=offset), num_queued=len(self.history)
        )

    def _seen(self, trajectory: Trajectory) -> EpisodeSeen:
        return replace(
            seen_of(trajectory, end_reason=trajectory.end_reason),  # type: ignore[arg-type]
            num_turns=trajectory.num_turns,
            wall_s=25.0 if trajectory.horizon > 5 else 1.0,
        )

    def _accept(self, trajectory: Trajectory) -> None:
        if trajectory in self.index:
            return
        self.journal.append(trajectory)
        self._adopt(trajectory, len(self.journal) - 1)
        self.index.move_end(JournalPosition(offset=len(self.journal)))
        outcomes, groups = self.groups.add(trajectory)
        self._tell(outcomes=outcomes, groups=groups)

    @rule()
    def beat_of_learner(self) -> None:
        progress = self.table.beat("learner-0", self.groups.open_ids, self.version)
        self._hear(progress)
        self.bounds = {(b.env, b.horizon): b.max_lag_steps for b in progress.lag_bounds}
        assert progress.closed_below >= self.index.closed_below
        self.index.close_below(progress.closed_below)
        self.groups.close_below(progress.closed_below)
        self.num_saved = self.num_told_at_save
        for episode_id in progress.revoked:
            outcomes, groups = self.groups.give_up(*split_episode_id(episode_id))
            self._tell(outcomes=outcomes, groups=groups)

    @precondition(lambda self: self.groups.is_batch_ready(self.version))
    @rule(dies=st.sampled_from([False] * 6 + [True]), seconds=st.sampled_from([1.0, 8.0]))
    def train(self, dies: bool, seconds: float) -> None:
        self.table.clock.now += seconds
        batch, stale = self.groups.take(
            self.version, max_lag_steps=MAX_LAG_STEPS, in_order=False, lag_bounds=self.bounds
        )
        self._tell(outcomes=stale)
        self.stale += stale
        if not batch:
            return
        if dies:  # It dies with its batch.
            self.restart_learner()
            return
        for group in batch:
            assert group.group_id not in self.trained
            self.trained.add(group.group_id)
            for member in group.members:
                bound = self.bounds.get((member.env, member.horizon), MAX_LAG_STEPS)
                assert self.version - oldest_version(member) <= bound
                assert bound <= MAX_LAG_STEPS * MAX_STRETCH
        trained = [outcome_of(t.episode_id, Outcome.TRAINED) for g in batch for t in g.members]
        self.version += 1
        self.logged.append([*trained, *self.stale])
        self.index.trained([group.group_id for group in batch], step=self.version)
        self.stale = []
        self._tell(outcomes=trained)
        self._hear(self.table.step(self.version))

    @rule(num_kept=st.integers(1, 3))
    def save_checkpoint(self, num_kept: int) -> None:
        self.checkpoints = sorted({*self.checkpoints, self.version})[-num_kept:]
        self.replay_point = self.index.replay_point(
            num_saved=self.num_saved, version=self.checkpoints[0]
        )

    @rule()
    def restart_learner(self) -> None:
        self.incarnations["learner-0"] += 1
        self._start_learner()
        self._hello("learner-0")
        self._tell_everything()

    def _start_learner(self) -> None:
        """From what the journal holds behind the replay point, and the step log."""
        point = self.replay_point
        self.index = JournalIndex(
            end=JournalPosition(offset=len(self.journal)), closed_below=point.closed_below
        )
        self.groups = GroupAssembly(self.cfg.groups, AlgorithmSection(), has_signal=has_signal)
        self.bounds: dict[tuple[str, int], int] = {}
        self.stale: list[EpisodeOutcome] = []  # not written down yet
        self.history: list[dict[str, Any]] = []
        self.num_saved = self.num_told_at_save = 0
        read = list(enumerate(self.journal))[point.position.offset :]
        self._assert_steps_can_be_repeated({trajectory.episode_id for _, trajectory in read})
        steps = {each.episode_id: v for v, step in enumerate(self.logged, 1) for each in step}
        for step in self.logged:
            open_ones = [o for o in step if not is_below(o.episode_id, point.closed_below)]
            self._tell(outcomes=open_ones, only_remember=True)
        for offset, trajectory in read:
            self._readopt(trajectory, offset, step=steps.get(trajectory.episode_id))

    def _assert_steps_can_be_repeated(self, read: set[str]) -> None:
        """Any checkpoint that is left may be the one that is restored."""
        for step in self.logged[self.checkpoints[0] :]:
            assert {o.episode_id for o in step if o.outcome is Outcome.TRAINED} <= read

    def _readopt(self, trajectory: Trajectory, offset: int, *, step: int | None) -> None:
        if self.index.is_closed(trajectory):
            self.index.add_entry(trajectory, JournalPosition(offset=offset), num_queued=0)
        else:
            self._adopt(trajectory, offset, only_remember=True)
            outcomes, groups = (
                self.groups.add(trajectory)
                if step is None
                else self.groups.mark_completed(trajectory.group_id)
            )
            self._tell(outcomes=outcomes, groups=groups, only_remember=True)
        if step is not None:
            self.index.trained([trajectory.group_id], step=step)

    def _tell_everything(self) -> None:
        """All that no state on disk has."""
        for report in self.history[self.num_saved :]:
            self._hear(self.table.report(**report))
        self._hear(self.table.step(self.version))

    # --- scheduler ----------------------------------------------------------------------------

    @rule()
    def save_scheduler(self) -> None:
        self.core.mark_saved()
        self.num_told_at_save = len(self.history)

    @rule(has_log=st.booleans())
    def restart_scheduler(self, has_log: bool) -> None:
        state = json.loads(json.dumps(self.core.snapshot(with_volatile=has_log)))
        core = SchedulerCore(build_components(self.cfg, CATALOGUE), clock=self.table.clock)
        core.restore(state)
        assert core.snapshot() == self.core.snapshot()
        core.mark_saved()
        self.table.core = core
        self._tell_everything()

    # --- the laws -----------------------------------------------------------------------------

    @invariant()
    def ledger_and_audit_balance(self) -> None:
        books = self.core.lifecycle
        books.assert_balanced()
        settled, audited = books.ledger.train.settled, books.audit.total()
        assert audited.total() == sum(settled.values())
        assert audited[ENDED] == 0
        assert all(audited[name] == num for name, num in settled.items())

    @invariant()
    def what_was_trained_is_booked_as_trained(self) -> None:
        said = [each for step in self.logged for each in step]
        num_trained = sum(each.outcome is Outcome.TRAINED for each in said)
        assert self.core.lifecycle.ledger.train.settled["trained"] == num_trained

    @invariant()
    def lease_has_one_holder(self) -> None:
        leases = self.core.lifecycle.leases
        held = [e.episode_id for name in ACTORS for e in leases.of(name)]
        assert len(set(held)) == len(held) == len(leases)
        assert set(held) == ids_in(self.core, EpisodePhase.LEASED)

    @invariant()
    def what_arrived_is_in_the_hands_of_the_learner(self) -> None:
        held = {trajectory.episode_id for trajectory in held_by(self.groups)}
        assert ids_in(self.core, EpisodePhase.ARRIVED) <= held

    @invariant()
    def everything_settled_has_left_or_waits_for_the_learner(self) -> None:
        """No ghosts: what the learner waits for, the scheduler waits for or will give up."""
        table = self.core.lifecycle.table
        waiting = set(self.groups.open_ids)
        size = self.cfg.groups.size
        given_up = table.given_up_ids(sorted(waiting), group_size=size)
        told = {split_episode_id(each)[0] for each in given_up}
        assert waiting <= set(table.groups) | told

    def teardown(self) -> None:
        """Liveness: once all roles are healthy, a step is trained soon."""
        version = self.version
        for number in range(60):
            self.beat_of_learner()  # Leases are kept while the learner is silent.
            for name in ACTORS:
                self.beat(name)
                self.play(name, random.Random(number), 0)
            if self.groups.is_batch_ready(self.version):
                self.train(dies=False, seconds=1.0)
            self.wait(6.0)
            if self.version > version:
                return
        raise AssertionError(f"nothing trained: {self.core.status()['groups']}")


TestTwoSidesHold = pytest.mark.slow(TwoSidesMachine.TestCase)
TestTwoSidesHold.settings = settings(max_examples=20, stateful_step_count=80)


class TwiceAsManyRunsMachine(TwoSidesMachine):
    """The same in more random runs."""


TestTwoSidesHoldInManyRuns = pytest.mark.long(TwiceAsManyRunsMachine.TestCase)
TestTwoSidesHoldInManyRuns.settings = settings(max_examples=150, stateful_step_count=80)


@pytest.mark.parametrize("seed", range(8))
def test_group_stale_before_a_restart_is_not_trained_after(seed: int) -> None:
    run = TwoSidesMachine()
    run.play("actor-0", random.Random(seed), 0)
    for _ in range(3):
        if run.groups.is_batch_ready(run.version):
            run.train(dies=False, seconds=1.0)
    run.restart_learner()  # Its stale outcomes are not yet on disk.
    run.save_scheduler()
    run.beat_of_learner()
    run.save_checkpoint(1)
    if run.groups.is_batch_ready(run.version):
        run.train(dies=False, seconds=1.0)
    run.restart_learner()  # every step after the checkpoint can be repeated
    run.teardown()
