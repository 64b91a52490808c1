"""Laws of samples."""

from dataclasses import replace

from common.config import AlgorithmSection
from common.messages import Trajectory
from learner.groups import Group
from learner.samples import group_has_signal, samples_of
from tests.learner.builders import make_trajectory


def member(number: int, reward: float, *, num_invalid: int = 0) -> Trajectory:
    trajectory = make_trajectory([1, 2], [0, 1], member=number)
    return replace(trajectory, reward=reward, num_invalid_actions=num_invalid)


def test_each_member_gets_its_own_advantage_in_order() -> None:
    groups = [
        Group(group_id="a", members=[member(0, 1.0), member(1, 0.0), member(2, 0.5)]),
        Group(group_id="b", members=[member(0, 0.0), member(3, 1.0)]),
    ]
    samples = samples_of(groups, AlgorithmSection())
    assert [sample.advantage for sample in samples] == [0.75, -0.75, 0.0, -1.0, 1.0]
    assert [sample.trajectory.member for sample in samples] == [0, 1, 2, 0, 3]


def test_signal_is_judged_on_the_penalized_reward() -> None:
    members = [member(0, 1.0), member(1, 1.0, num_invalid=1)]
    assert not group_has_signal(members, AlgorithmSection())
    assert group_has_signal(members, AlgorithmSection(invalid_action_penalty=0.1))
