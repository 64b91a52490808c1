"""Laws of credit among turns in one state, of running baselines and of the second moment."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from common.config.algorithm import AlgorithmSection, Baseline, StateCredit
from common.segments import Aside
from common.wire.messages import Trajectory
from learner.algorithms.ecpo import shrunk_advantages
from learner.algorithms.gagpo import grouped_gae
from learner.algorithms.gigpo import step_advantages
from learner.algorithms.m2po import second_moment_mask
from learner.algorithms.running import RunningBaseline
from learner.ingest.buffer import Group
from learner.objective.advantages import samples_of
from tests.learner.builders import make_trajectory

STATES = np.array([0, 1, 0, 0, 2])
RETURNS = np.array([1.0, 1.0, 0.0, 0.5, 0.5])


def test_gigpo_compares_turns_within_same_state() -> None:
    mean, others = Baseline.GROUP_MEAN, Baseline.LEAVE_ONE_OUT
    credit = step_advantages(RETURNS, STATES, baseline=mean, normalize_std=False)
    assert credit.tolist() == [0.5, 0.0, -0.5, 0.0, 0.0]
    credit = step_advantages(RETURNS, STATES, baseline=others, normalize_std=False)
    assert credit.tolist() == [0.75, 0.0, -0.75, 0.0, 0.0]
    scaled = step_advantages(RETURNS, STATES, baseline=mean, normalize_std=True)
    assert scaled[0] == pytest.approx(0.5 / (math.sqrt(1 / 6) + 1e-6))


def test_equal_returns_give_exactly_nothing() -> None:
    flat = np.full(5, 0.1)
    assert not step_advantages(flat, STATES, baseline=Baseline.GROUP_MEAN, normalize_std=True).any()
    assert not shrunk_advantages(flat, STATES, np.arange(5), prior_visits=1.0).any()
    parts = grouped_gae([np.array([0.0, 0.1])] * 2, [np.array([0, 1])] * 2, discount=1, trace=0.5)
    assert not np.concatenate(parts).any()


def test_ecpo_shrinks_by_action_visits_and_state_variance() -> None:
    states, actions = np.zeros(3, dtype=int), np.array([0, 0, 1])
    credit = shrunk_advantages(np.array([1.0, 1.0, 0.0]), states, actions, prior_visits=1.0)
    assert credit.tolist() == pytest.approx([2 / 3 / 3, 2 / 3 / 3, -2 / 3 / 2])  # gate 1
    noisy = shrunk_advantages(np.array([1.0, 0.0, 0.5]), states, actions, prior_visits=0.0)
    assert noisy.tolist() == [0.0, 0.0, 0.0]  # all variance lies within an action


def thinking(number: int, action: int, reward: float, **changes: Any) -> Trajectory:
    """Build an episode of one turn: a thought of its own, then the action."""
    plain = make_trajectory([1, 10 + number, action], [0, 1, 1], member=number)
    states = np.zeros(1, dtype=np.int32)
    return replace(plain, reward=reward, turn_states=states, **changes)


ACTIONS = [(2, 1.0), (2, 0.0), (3, 0.0), (3, 0.0)]  # a a b b paid 1 0 0 0
# Of a state of mean 1/4: a is worth 1/2. Gate (1/16) / (1/16 + 1/8), 2 visits of 2 + 1.
OF_ACTIONS = [1 / 18, 1 / 18, -1 / 18, -1 / 18]


@pytest.mark.parametrize(
    "changes_of",
    [
        lambda action: {"turn_actions": np.array([action], dtype=np.int32)},
        lambda _: {"asides": np.array([1, 2, Aside.PLAN], dtype=np.int32)},  # An older record.
    ],
)
def test_ecpo_compares_actions_and_ignores_thoughts(
    changes_of: Callable[[int], dict[str, Any]],
) -> None:
    members = [thinking(i, a, paid, **changes_of(a)) for i, (a, paid) in enumerate(ACTIONS)]
    cfg = AlgorithmSection(state_credit=StateCredit.ECPO, baseline=Baseline.GROUP_MEAN)
    got = samples_of([Group(group_id="g", members=members)], cfg)
    of_state = [s.token_advantages()[0] - s.advantage for s in got]
    assert of_state == pytest.approx(OF_ACTIONS)


def test_gagpo_credits_the_turn_that_leaves_a_shared_state() -> None:
    rewards = [np.array([0.0, 1.0]), np.array([0.0, 0.0])]
    states = [np.array([0, 1]), np.array([0, 2])]
    won, lost = grouped_gae(rewards, states, discount=1.0, trace=0.5)
    assert (won.tolist(), lost.tolist()) == ([0.5, 0.0], [-0.5, 0.0])
    none, one = grouped_gae(
        [np.zeros(0), np.ones(1)], [np.zeros(0, int)] * 1 + [np.zeros(1, int)], discount=1, trace=1
    )
    assert (none.size, one.tolist()) == (0, [0.0])


def test_running_baseline_excludes_the_current_reward() -> None:
    baseline, how = RunningBaseline(), {"memory": 0.5, "prior": 1.0}
    assert baseline.advantages([1.0, 0.0], ["a", "b"], ["t", "t"], **how).tolist() == [1.0, -1.0]
    again = RunningBaseline()
    again.load_state_dict(baseline.state_dict())
    for each in (baseline, again):
        later = each.advantages([0.5, 0.5, 0.5], ["a", "c", "z"], ["t", "t", "alone"], **how)
        assert later.tolist() == [-0.25, 0.0, 0.0]  # (1 + .5) / 2; the task's .5; nothing known


def test_second_moment_masks_the_fewest_outliers() -> None:
    ratios = torch.tensor([0.1, -0.2, 0.3, -1.0])
    kept = [second_moment_mask(ratios, threshold=t).tolist() for t in (0.3, 0.05, 0.001)]
    assert kept == [[True] * 4, [True, True, True, False], [True, False, False, False]]
