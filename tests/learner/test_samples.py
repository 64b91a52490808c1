"""Laws of samples."""

from dataclasses import replace

import numpy as np
import pytest

from common.config import Aggregation, AlgorithmSection, CreditLevel
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


def turns(number: int, reward: float, invalid: list[bool], *, tokens: int = 1) -> Trajectory:
    """Build a member that sampled `tokens` tokens in each of its turns."""
    ids = [1] + [2] * tokens * len(invalid)
    trajectory = make_trajectory(ids, [0] + [1] * (len(ids) - 1), member=number)
    turn_ids = [0] + [turn for turn in range(len(invalid)) for _ in range(tokens)]
    return replace(
        trajectory,
        reward=reward,
        num_turns=len(invalid),
        num_invalid_actions=sum(invalid),
        invalid_turns=np.array(invalid),
        turn_ids=np.array(turn_ids, dtype=np.int32),
    )


def test_turn_penalty_lands_on_the_invalid_turns_and_sums_to_zero_over_the_group() -> None:
    cfg = AlgorithmSection(invalid_action_penalty=0.4, invalid_action_level=CreditLevel.TURN)
    group = Group(group_id="a", members=[turns(0, 1.0, [False, True]), turns(1, 0.0, [False] * 2)])
    first, second = samples_of([group], cfg)
    assert first.token_advantages().tolist() == pytest.approx([1.0 + 0.1, 1.0 - 0.3])
    assert second.token_advantages().tolist() == pytest.approx([-1.0 + 0.1, -1.0 + 0.1])


def test_turn_penalty_is_signal_where_rewards_are_equal() -> None:
    cfg = AlgorithmSection(invalid_action_penalty=0.4, invalid_action_level=CreditLevel.TURN)
    assert group_has_signal([turns(0, 0.0, [True]), turns(1, 0.0, [False])], cfg)
    assert not group_has_signal([turns(0, 0.0, [True]), turns(1, 0.0, [True])], cfg)


def test_sequence_aggregation_gives_every_episode_the_same_weight() -> None:
    group = Group(group_id="a", members=[turns(0, 1.0, [False]), turns(1, 0.0, [False], tokens=3)])
    short, long = samples_of([group], AlgorithmSection(aggregation=Aggregation.SEQUENCE))
    assert short.token_advantages().sum() == pytest.approx(2.0)  # mean length 2, advantage 1
    assert long.token_advantages().sum() == pytest.approx(-2.0)


def test_turn_discount_prefers_the_shorter_solution() -> None:
    group = Group(group_id="a", members=[turns(0, 1.0, [False]), turns(1, 1.0, [False] * 3)])
    short, long = samples_of([group], AlgorithmSection(turn_discount=0.5))
    assert short.advantage == pytest.approx(1.0 - 0.25)
    assert long.advantage == pytest.approx(0.25 - 1.0)
