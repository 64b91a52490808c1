"""Laws of groups that wait for their teacher, from a real actor's socket to the batch."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from common.errors import LongstrideError
from common.wire.codec import decode, encode
from common.wire.messages import EpisodeKind, Trajectory
from learner.ingest.buffer import Group
from learner.objective.advantages import samples_of
from learner.teacher.scores import TeacherScores
from tests.learner.ingest.intake_rig import Setup, member


class SlowTeacher:
    """A teacher that answers when the test decides, and a bound of the intake."""

    def __init__(self) -> None:
        self.pending: list[tuple[list[str], Future[list[TeacherScores]]]] = []
        self.has_room = True

    def begin(self, members: Sequence[Trajectory]) -> Future[list[TeacherScores]]:
        self.pending.append(([each.episode_id for each in members], Future()))
        return self.pending[-1][1]

    def answer(self) -> None:
        ids, pending = self.pending.pop(0)
        scores = [np.array([-1.0 - number], dtype=np.float32) for number in range(len(ids))]
        pending.set_result([TeacherScores(logprobs=each) for each in scores])


@pytest.fixture
def teacher() -> SlowTeacher:
    return SlowTeacher()


@pytest.fixture
def taught(tmp_path: Path, teacher: SlowTeacher) -> Iterator[Setup]:
    setup = Setup(tmp_path, score=teacher.begin, has_room=lambda: teacher.has_room)
    setup.intake.start()
    yield setup
    setup.close()


def deliver_group(setup: Setup, group_id: str, version: int = 0) -> None:
    for number in range(3):
        setup.deliver(member(number, group_id=group_id, version=version))
    setup.scheduler.pump_until(lambda: setup.scheduler.groups.get(group_id) is True)


def test_group_is_trained_only_after_its_scores(taught: Setup, teacher: SlowTeacher) -> None:
    deliver_group(taught, "g")
    assert [ids for ids, _ in teacher.pending] == [["g/0", "g/1", "g/2"]]
    with pytest.raises(TimeoutError, match="1 group waits for its teacher"):
        taught.next_batch(timeout_s=0.1)
    teacher.answer()
    (group,), _ = taught.next_batch()
    assert {name: each.logprobs.tolist() for name, each in group.scores.items()} == {
        "g/0": [-1.0],
        "g/1": [-2.0],
        "g/2": [-3.0],
    }
    algorithm = taught.algorithm
    samples = samples_of([group], algorithm)
    found = [np.asarray(each.teacher_logprobs).tolist() for each in samples]
    assert found == [[-1.0], [-2.0], [-3.0]]


def test_scored_groups_overtake_groups_without_scores(taught: Setup, teacher: SlowTeacher) -> None:
    deliver_group(taught, "g")
    deliver_group(taught, "h")
    teacher.pending.reverse()
    teacher.answer()
    (group,), _ = taught.next_batch()
    assert group.group_id == "h"
    teacher.answer()
    (group,), _ = taught.next_batch(1)
    assert group.group_id == "g"


def test_group_that_became_stale_while_it_waited_is_dropped(
    taught: Setup, teacher: SlowTeacher
) -> None:
    deliver_group(taught, "g")
    teacher.answer()
    with pytest.raises(TimeoutError):
        taught.next_batch(2, timeout_s=0.1)  # The bound of the lag is 1.
    taught.scheduler.pump_until(lambda: len(taught.scheduler.outcomes) == 3)
    assert {*taught.scheduler.outcomes.values()} == {("stale", "lag")}


def test_full_teacher_delays_acknowledgements_of_training_only(
    taught: Setup, teacher: SlowTeacher
) -> None:
    teacher.has_room = False
    for _ in range(2):  # The actor sends it again.
        taught.actor.send_multipart(encode(member(0)))
    tested = replace(member(1, group_id="e"), kind=EpisodeKind.EVAL)
    assert taught.deliver(tested).is_accepted
    assert not taught.actor.poll(200)
    assert taught.journaled() == ["e/1"]
    teacher.has_room = True
    assert decode(taught.actor.recv_multipart()).episode_id == "g/0"
    assert taught.journaled() == ["e/1", "g/0"]
    assert taught.admission.counts()["admission/duplicates"] == 0


def test_group_without_reward_signal_is_taught(taught: Setup, teacher: SlowTeacher) -> None:
    for number in range(3):
        taught.deliver(replace(member(number), reward=0.0))
    taught.scheduler.pump_until(lambda: taught.scheduler.groups.get("g") is True)
    assert len(teacher.pending) == 1


def test_closed_group_is_not_trained_when_its_scores_arrive(
    taught: Setup, teacher: SlowTeacher
) -> None:
    deliver_group(taught, "g0000003")
    taught.scheduler.told.save(closed_below=4)
    taught.scheduler.pump_beats(2)
    teacher.answer()
    with pytest.raises(TimeoutError):
        taught.next_batch(timeout_s=0.1)


def test_sample_without_scores_is_an_error_and_no_zero(taught: Setup) -> None:
    group = Group(group_id="g", members=[member(0), member(1)])
    with pytest.raises(LongstrideError, match=r"episode g/0 has no scores of algorithm\.teacher"):
        samples_of([group], taught.algorithm)
