"""Laws of the off-policy correction."""

from math import log

import pytest
import torch

from learner.correction import (
    effective_sample_size,
    log_ratio,
    ratio_statistics,
    surplus_weights,
    truncated_weights,
)

MU = torch.tensor([log(0.5), log(0.1), log(0.4)])
PI = torch.tensor([log(0.25), log(0.5), log(0.4)])  # ratios 0.5, 5, 1


def test_truncated_weight_is_the_ratio_up_to_the_cap() -> None:
    got = truncated_weights(PI, MU, cap=2.0)
    torch.testing.assert_close(got, torch.tensor([0.5, 2.0, 1.0]))


def test_surplus_weight_times_the_ratio_is_the_truncated_ratio() -> None:
    got = surplus_weights(PI, MU, cap=2.0)
    torch.testing.assert_close(got, torch.tensor([1.0, 0.4, 1.0]))
    torch.testing.assert_close(got * (PI - MU).exp(), truncated_weights(PI, MU, cap=2.0))


@pytest.mark.parametrize("weights", [truncated_weights, surplus_weights])
def test_correction_is_the_identity_when_sampler_and_policy_agree(weights) -> None:
    assert weights(MU, MU, cap=2.0).tolist() == [1.0, 1.0, 1.0]
    assert ratio_statistics(MU, MU) == {
        "offpolicy/ess_frac": pytest.approx(1.0),
        "offpolicy/ratio_p01": 1.0,
        "offpolicy/ratio_p50": 1.0,
        "offpolicy/ratio_p99": 1.0,
        "policy/kl_sampler": 0.0,
    }


@pytest.mark.parametrize("weights", [truncated_weights, surplus_weights])
def test_cap_zero_switches_the_correction_off(weights) -> None:
    assert weights(PI, MU, cap=0.0).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("weights", [truncated_weights, surplus_weights])
def test_weights_carry_no_gradient(weights) -> None:
    assert not weights(PI.clone().requires_grad_(), MU, cap=2.0).requires_grad


def test_log_ratio_is_bounded_so_that_its_exponential_is_finite() -> None:
    got = log_ratio(torch.tensor([0.0, -500.0]), torch.tensor([-500.0, 0.0]))
    assert got.tolist() == [20.0, -20.0]


def test_log_ratio_refuses_to_broadcast() -> None:
    with pytest.raises(ValueError, match="one shape"):
        log_ratio(torch.zeros(3), torch.zeros(1))


def test_effective_sample_size_counts_only_what_the_mask_selects() -> None:
    weights = torch.tensor([1.0, 3.0, 1e6])
    mask = torch.tensor([True, True, False])
    assert effective_sample_size(weights, mask).item() == pytest.approx(16 / 20)


def test_effective_sample_size_is_one_nth_when_one_weight_dominates() -> None:
    weights = torch.tensor([5e8, 1e-9, 1e-9, 1e-9])
    got = effective_sample_size(weights, torch.ones(4, dtype=torch.bool))
    assert got.item() == pytest.approx(0.25)


def test_effective_sample_size_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        effective_sample_size(torch.ones(2), torch.zeros(2, dtype=torch.bool))


def test_ratio_statistics_match_hand_computed_numbers() -> None:
    got = ratio_statistics(PI, MU)
    assert got["offpolicy/ess_frac"] == pytest.approx(6.5**2 / (3 * 26.25))
    assert got["offpolicy/ratio_p50"] == pytest.approx(1.0)
    assert got["offpolicy/ratio_p99"] == pytest.approx(5.0)
    expected = ((0.5 - 1 - log(0.5)) + (5 - 1 - log(5))) / 3
    assert got["policy/kl_sampler"] == pytest.approx(expected, rel=1e-5)
