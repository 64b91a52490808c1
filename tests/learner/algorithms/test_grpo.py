"""Laws of rewards and advantages."""

import pytest
import torch

from common.config.algorithm import Baseline
from learner.algorithms.grpo import group_advantages, has_signal
from learner.algorithms.rewards import shaped_reward


def test_leave_one_out_baseline_excludes_own_reward() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.5])
    got = group_advantages(rewards, baseline=Baseline.LEAVE_ONE_OUT, normalize_std=False)
    torch.testing.assert_close(got, torch.tensor([0.75, -0.75, 0.0]))


def test_group_mean_uses_the_mean_of_all_members() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])
    got = group_advantages(rewards, baseline=Baseline.GROUP_MEAN, normalize_std=False)
    torch.testing.assert_close(got, torch.tensor([0.75, -0.25, -0.25, -0.25]))


def test_normalized_advantages_have_unit_population_std() -> None:
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0])
    got = group_advantages(rewards, baseline=Baseline.GROUP_MEAN, normalize_std=True)
    torch.testing.assert_close(got, torch.tensor([1.0, -1.0, 1.0, -1.0]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("baseline", list(Baseline))
@pytest.mark.parametrize("normalize_std", [False, True])
def test_equal_or_single_rewards_have_exactly_zero_advantage(
    baseline: Baseline, normalize_std: bool
) -> None:
    rewards = torch.full((7,), 0.1)
    for group in (rewards, rewards[:1]):
        got = group_advantages(group, baseline=baseline, normalize_std=normalize_std)
        assert got.tolist() == [0.0] * len(group)


def test_group_of_two_survivors_keeps_baseline() -> None:
    rewards = torch.tensor([1.0, 0.0])
    got = group_advantages(rewards, baseline=Baseline.LEAVE_ONE_OUT, normalize_std=False)
    assert got.tolist() == [1.0, -1.0]


@pytest.mark.parametrize("rewards", [[], [[1.0, 0.0]], [1.0, float("nan")]])
def test_advantages_refuse_malformed_groups(rewards: list) -> None:
    with pytest.raises(ValueError, match="rewards must"):
        group_advantages(torch.tensor(rewards), baseline=Baseline.GROUP_MEAN, normalize_std=False)


def test_only_unequal_rewards_have_signal() -> None:
    assert has_signal(torch.tensor([0.0, 1e-3]))
    assert not has_signal(torch.tensor([0.3, 0.3, 0.3]))


def test_penalty_is_in_proportion_to_invalid_actions() -> None:
    assert shaped_reward(1.0, 1, 4, 0.2) == pytest.approx(0.95)
    assert shaped_reward(0.0, 3, 3, 0.2) == pytest.approx(-0.2)
    assert shaped_reward(0.5, 0, 0, 0.2) == 0.5


def test_shaped_reward_refuses_more_invalid_actions_than_turns() -> None:
    with pytest.raises(ValueError, match="num_invalid=3"):
        shaped_reward(1.0, 3, 2, 0.2)
