"""Laws of what a learner remembers of its journal."""

from dataclasses import replace

from common.wire.messages import EndReason, EpisodeKind, Trajectory
from learner.ingest.journal_index import MAX_EVALUATIONS, JournalIndex, ReplayPoint
from learner.journal.journal import JOURNAL_START, JournalPosition
from tests.learner.builders import make_trajectory


def episode(group: int, member: int = 0) -> Trajectory:
    return make_trajectory([1, 2], [0, 1], group_id=f"g{group:07d}", member=member)


def evaluation(number: int, member: int = 0) -> Trajectory:
    return replace(
        make_trajectory([1, 2], [0, 1], group_id=f"eval-{number}", member=member),
        kind=EpisodeKind.EVAL,
    )


def at(offset: int) -> JournalPosition:
    return JournalPosition(offset=offset)


def make_index(*episodes: Trajectory) -> JournalIndex:
    """An index of a journal with records at 0, 10, 20 ..., reported in messages 1, 2, 3 ..."""
    index = JournalIndex(end=JOURNAL_START)
    for i, each in enumerate(episodes):
        index.add_episode(each)
        index.add_entry(each, at(10 * i), num_queued=i + 1)
    index.move_end(at(10 * len(episodes)))
    return index


def position(index: JournalIndex, *, num_saved: int = 0, version: int = 0) -> JournalPosition:
    return index.replay_point(num_saved=num_saved, version=version).position


def test_replay_point_is_the_first_unsettled_groups_record() -> None:
    index = make_index(episode(0), episode(1), episode(0, 1), episode(2))
    assert position(index) == at(0)
    index.close_below(1)
    assert position(index) == at(10)
    index.close_below(2)
    assert position(index) == at(30)


def test_replay_point_of_a_settled_journal_is_its_end() -> None:
    index = make_index(episode(0), episode(1))
    index.close_below(2)
    made = index.replay_point(num_saved=0, version=7)
    assert made == ReplayPoint(position=at(20), closed_below=2, version=7)


def test_replay_point_precedes_a_pending_record() -> None:
    index = make_index(episode(0))
    index.close_below(1)
    index.add_episode(
        episode(1)
    )  # appended by another thread; the end is not moved before it is entered
    assert position(index) == at(10)
    index.add_entry(episode(1), at(10), num_queued=2)
    index.move_end(at(20))
    assert position(index) == at(10)


def test_replay_point_waits_for_a_checkpoint_of_the_step() -> None:
    index = make_index(episode(0), episode(1))
    index.trained(["g0000000"], step=30)
    index.close_below(2)
    assert position(index, version=29) == at(0)
    assert position(index, version=30) == at(20)


def test_evaluation_is_reread_until_the_scheduler_has_saved_it() -> None:
    index = make_index(evaluation(0), evaluation(0, 1), episode(0))
    assert position(index, num_saved=1) == at(0)
    assert position(index, num_saved=2) == at(20)


def test_episode_is_known_by_id_or_group() -> None:
    index = make_index(episode(3))
    assert episode(3) in index
    assert episode(3, 1) not in index
    index.close_below(4)
    assert episode(3) in index
    assert episode(3, 1) in index, "it comes too late: its group is settled"
    assert episode(4) not in index
    position(index)
    assert len(index) == 0


def test_failed_evaluation_may_repeat_but_failed_training_may_not() -> None:
    failed = {"end_reason": EndReason.ENV_ERROR}
    index = make_index(replace(evaluation(0), **failed), replace(episode(0), **failed))
    assert evaluation(0) not in index
    assert episode(0) in index


def test_evaluation_never_counts_as_settled_by_group_number() -> None:
    index = make_index()
    index.close_below(9)
    assert replace(episode(3), kind=EpisodeKind.EVAL) not in index


def test_memory_is_bounded_by_open_groups() -> None:
    index = make_index()
    for number in range(5_000):
        known = [episode(number, member) for member in range(2)]
        if number % 10 == 0:
            known.append(evaluation(number))
        for each in known:
            index.add_episode(each)
            index.add_entry(each, at(number), num_queued=number)
        index.trained([f"g{number:07d}"], step=number)
        index.close_below(max(0, number - 5))
        index.replay_point(num_saved=number - 1, version=number - 10)
    assert len(index) <= 2 * 6 + MAX_EVALUATIONS + 12
