"""Laws of returns, GAE and V-trace, by hand-computed numbers."""

import pytest
import torch

from learner.algorithms.critic import gae, vtrace
from learner.algorithms.rewards import discounted_returns

REWARDS = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
VALUES = torch.tensor([0.5, 1.5, 1.0], dtype=torch.float64)


def test_returns_discount_later_rewards() -> None:
    got = discounted_returns(REWARDS, discount=0.5, bootstrap=4.0)
    assert got.tolist() == [1.5, 3.0, 4.0]  # 4 = 2 + 0.5 * 4


def test_gae_matches_hand_computed_numbers() -> None:
    got = gae(REWARDS, VALUES, discount=0.5, trace=0.5, bootstrap=2.0)
    # deltas 0.25, 0.0, 2.0
    assert got.tolist() == pytest.approx([0.25 + 0.25 * 0.5, 0.0 + 0.25 * 2.0, 2.0])


def test_gae_with_full_trace_is_return_minus_value() -> None:
    got = gae(REWARDS, VALUES, discount=1.0, trace=1.0, bootstrap=0.0)
    returns = discounted_returns(REWARDS, discount=1.0)
    torch.testing.assert_close(got, returns - VALUES)


def test_gae_without_trace_is_the_one_step_error() -> None:
    got = gae(REWARDS, VALUES, discount=0.5, trace=0.0, bootstrap=2.0)
    assert got.tolist() == [0.25, 0.0, 2.0]


def test_vtrace_on_policy_gives_n_step_returns() -> None:
    targets, advantages = vtrace(
        REWARDS,
        VALUES,
        torch.zeros(3, dtype=torch.float64),
        discount=0.5,
        trace=1.0,
        max_rho=1.0,
        max_c=1.0,
        bootstrap=4.0,
    )
    returns = discounted_returns(REWARDS, discount=0.5, bootstrap=4.0)
    torch.testing.assert_close(targets, returns)
    torch.testing.assert_close(advantages, returns - VALUES)


def test_vtrace_truncates_both_ratios() -> None:
    targets, advantages = vtrace(
        torch.tensor([1.0, 3.0]),
        torch.tensor([2.0, 1.0]),
        torch.tensor([3.0, 0.5]).log(),
        discount=1.0,
        trace=1.0,
        max_rho=2.0,
        max_c=1.0,
        bootstrap=0.0,
    )
    # last: delta = 0.5 * (3 - 1) = 1, target 2. first: rho 2, c 1: 2 + 2 * (1 + 1 - 2) + (2 - 1)
    assert targets.tolist() == pytest.approx([3.0, 2.0])
    assert advantages.tolist() == pytest.approx([1.0 + 2.0 - 2.0, 3.0 - 1.0])


@pytest.mark.parametrize("bad", [torch.zeros(0), torch.zeros(2), torch.zeros(3, 1)])
def test_shapes_that_differ_are_refused(bad: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="one shape"):
        gae(REWARDS, bad, discount=1.0, trace=1.0, bootstrap=0.0)
