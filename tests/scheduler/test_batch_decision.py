"""Laws of the batch: the scheduler decides it and the learner takes it; both are real."""

from dataclasses import replace

import pytest

from common.config.algorithm import AlgorithmSection
from common.config.run_config import RunConfig
from common.config.train import TrainMode
from common.ids import split_episode_id
from common.wire.messages import EndReason, EpisodeOutcome, GroupArrived, Lease, Outcome, Progress
from learner.ingest.buffer import Group, GroupAssembly
from tests.scheduler.builders import Table, make_config, outcome_of, seen_of
from tests.scheduler.learner_side import has_signal, trajectory_of


class TwoSides:
    """A scheduler, one actor that plays all it gets, and a learner's groups."""

    def __init__(self, cfg: RunConfig) -> None:
        self.cfg = cfg
        self.table = Table(cfg)
        self.version = 0
        self.start_learner()
        self.table.hello("actor-0")

    def start_learner(self) -> None:
        """A new process: settled records precede its replay point and are not read."""
        self.groups = GroupAssembly(
            self.cfg.groups,
            AlgorithmSection(),
            has_signal=has_signal,
            is_lockstep=self.cfg.train.mode is TrainMode.SYNC,
        )
        self.table.hello("learner-0", version=self.version)

    def hear(self, progress: Progress | None) -> None:
        if progress is not None:
            self.groups.decide(progress.learner_version, progress.num_batch_groups)

    def ask(self) -> list[Lease]:
        return self.table.ask("actor-0", 99, self.version).leases

    def arrive(self, leases: list[Lease], *, is_equal: bool = False) -> None:
        """Groups come to the learner, each with signal unless all members are worth the same."""
        for lease in leases:
            reward = 1.0 if is_equal else float(lease.member == 0)
            trajectory = trajectory_of(
                lease, version=self.version, reward=reward, end_reason=EndReason.DONE
            )
            outcomes, groups = self.groups.add(trajectory)
            seen = [replace(seen_of(lease), reward=reward)]
            self.hear(self.table.report(seen=seen, outcomes=outcomes, groups=groups))

    def take(self) -> list[Group]:
        in_order = self.cfg.train.mode is TrainMode.SYNC
        return self.groups.take(self.version, max_lag_steps=9, in_order=in_order)[0]

    def train(self, batch: list[Group]) -> None:
        self.version += 1
        trained = [outcome_of(t.episode_id, Outcome.TRAINED) for g in batch for t in g.members]
        self.hear(self.table.report(outcomes=trained))
        self.hear(self.table.step(self.version))


def _arrived(group_id: str) -> GroupArrived:
    return GroupArrived(group_id=group_id, is_ready=True)


def _config(mode: TrainMode) -> RunConfig:
    """Batches of two groups; four are drawn for a step at most."""
    return make_config(mode=mode, size=3, per_step=2, max_oversample=2.0, max_ahead_steps=0)


@pytest.mark.parametrize("mode", list(TrainMode))
def test_restarted_learner_takes_the_short_batch_after_filtering(mode: TrainMode) -> None:
    """Three of four groups carry no signal and are settled; the new learner sees the fourth."""
    sides = TwoSides(_config(mode))
    sides.arrive(sides.ask(), is_equal=True)
    last = sides.ask()
    sides.arrive(last[:3], is_equal=True)
    sides.start_learner()
    sides.arrive(last[3:])
    assert sides.ask() == [], "the scheduler draws no more for this step"
    sides.hear(sides.table.beat("learner-0", [], version=sides.version))
    assert len(sides.take()) == 1


@pytest.mark.parametrize("mode", list(TrainMode))
def test_restarted_learner_completes_a_group_without_its_refused_member(mode: TrainMode) -> None:
    """A refused episode is in no journal: only the scheduler has its outcome."""
    sides = TwoSides(_config(mode))
    leases = sides.ask()
    ready = [lease.group_id for lease in leases[::3]]
    for lease in (leases[2], leases[5]):
        refused = EpisodeOutcome(
            episode_id=lease.episode_id, outcome=Outcome.FAILED, cause="refused"
        )
        _, groups = sides.groups.give_up(lease.group_id, lease.member)
        sides.hear(sides.table.report(outcomes=[refused], groups=groups))
    arrived = [lease for lease in leases if lease not in (leases[2], leases[5])]
    sides.arrive(arrived)
    sides.start_learner()
    sides.arrive(arrived)
    assert sides.ask() == [], "to the scheduler both groups are ready"
    progress = sides.table.beat("learner-0", sides.groups.open_ids, version=sides.version)
    for episode_id in progress.revoked:
        sides.groups.give_up(*split_episode_id(episode_id))
    sides.hear(progress)
    assert sorted(group.group_id for group in sides.take()) == ready


@pytest.mark.parametrize("mode", list(TrainMode))
def test_batch_decision_is_void_for_the_next_batch(mode: TrainMode) -> None:
    sides = TwoSides(_config(mode))
    sides.arrive(sides.ask(), is_equal=True)
    second = sides.ask()
    sides.arrive(second[:3], is_equal=True)
    sides.arrive(second[3:])
    batch = sides.take()
    assert len(batch) == 1
    sides.train(batch)
    fresh = sides.ask()
    sides.arrive(fresh[:3])
    assert sides.take() == []
    sides.arrive(fresh[3:])
    assert len(sides.take()) == 2


def test_sync_batch_does_not_depend_on_arrival_order() -> None:
    """Rounds: two filtered, two filtered (the bound is lifted), one ready and one to come."""
    taken: list[list[str]] = []
    for is_reversed in (False, True):
        sides = TwoSides(_config(TrainMode.SYNC))
        for _ in range(2):
            sides.arrive(sides.ask(), is_equal=True)
        leases = sides.ask()
        halves = [leases[:3], leases[3:]]
        for half in reversed(halves) if is_reversed else halves:
            assert sides.take() == []
            sides.arrive(half)
        taken.append([group.group_id for group in sides.take()])
    assert taken == [["g0000004", "g0000005"]] * 2


def test_report_is_answered_only_when_it_changes_the_batch() -> None:
    sides = TwoSides(_config(TrainMode.SYNC))
    leases = sides.ask()
    ready = [lease.group_id for lease in leases[::3]]
    assert sides.table.report(seen=[seen_of(lease) for lease in leases]) is None
    first = sides.table.report(groups=[_arrived(ready[0])])
    assert first is None
    second = sides.table.report(groups=[_arrived(ready[1])])
    assert second is not None
    assert (second.learner_version, second.num_batch_groups) == (0, 2)
