"""Laws of the off-policy correction."""

import math
from math import log

import numpy as np
import pytest
import torch
from torch import Tensor

from common.config.algorithm import AlgorithmSection, Correction, PolicyLoss, Proximal
from learner.algorithms.interface import LossInputs, log_ratio, sequence_mean
from learner.batch.batching import MicroBatch, Sample
from learner.objective.loss import (
    Denominator,
    anchor_and_weights,
    corrected,
    importance_weights,
    interpolated_logprobs,
    kl_weights,
    negative_mask,
    policy_loss,
)
from learner.objective.measures import (
    lag_statistics,
    ratio_statistics,
    sample_size_of,
    weight_moments,
)
from tests.learner.builders import make_microbatches, make_trajectory

MU = torch.tensor([log(0.5), log(0.1), log(0.4)])
PI = torch.tensor([log(0.25), log(0.5), log(0.4)])  # ratios 0.5, 5, 1
ROWS = torch.tensor([0, 0, 1])  # the first two tokens are one sequence


def weights_of(correction: Correction, log_rho: Tensor, *, is_ratio_included: bool = False):
    cfg = AlgorithmSection(correction=correction)
    return importance_weights(log_rho, ROWS, 2, cfg, is_ratio_included=is_ratio_included)


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (Correction.NONE, [1.0, 1.0, 1.0]),
        (Correction.TOKEN_TIS, [0.5, 2.0, 1.0]),
        (Correction.SEQUENCE_TIS, [2.0, 2.0, 1.0]),  # min(0.5 * 5, 2)
        (Correction.ICEPOP, [0.5, 5.0, 1.0]),  # the bounds belong to it
        (Correction.GEOMETRIC, [0.0, 0.0, 1.0]),  # sqrt(2.5) is not within 1 %
    ],
)
def test_weights_match_hand_computed_numbers(correction: Correction, expected: list) -> None:
    torch.testing.assert_close(weights_of(correction, PI - MU), torch.tensor(expected))


def test_icepop_masks_ratios_outside_its_bounds() -> None:
    got = weights_of(Correction.ICEPOP, torch.tensor([log(0.49), log(5.01), log(3.0)]))
    assert got.tolist() == pytest.approx([0.0, 0.0, 3.0])


def test_geometric_mask_uses_the_whole_sequence() -> None:
    got = weights_of(Correction.GEOMETRIC, torch.tensor([0.3, -0.3, 0.02]))
    assert got.tolist() == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    "correction", [Correction.TOKEN_TIS, Correction.SEQUENCE_TIS, Correction.ICEPOP]
)
def test_ratio_within_the_surrogate_is_not_counted_twice(correction: Correction) -> None:
    log_rho = PI - MU
    included = weights_of(correction, log_rho, is_ratio_included=True)
    torch.testing.assert_close(included * log_rho.exp(), weights_of(correction, log_rho))


@pytest.mark.parametrize("correction", [Correction.NONE, Correction.GEOMETRIC])
def test_pure_mask_leaves_surrogates_ratio_unchanged(correction: Correction) -> None:
    log_rho = torch.tensor([0.001, 0.002, 0.0])
    assert weights_of(correction, log_rho, is_ratio_included=True).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("is_ratio_included", [False, True])
@pytest.mark.parametrize("correction", list(Correction))
def test_every_corrector_is_the_identity_on_policy(
    correction: Correction, is_ratio_included: bool
) -> None:
    got = weights_of(correction, torch.zeros(3), is_ratio_included=is_ratio_included)
    assert got.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("correction", list(Correction))
def test_weights_carry_no_gradient(correction: Correction) -> None:
    cfg = AlgorithmSection(correction=correction)
    assert not corrected((PI - MU).requires_grad_(), ROWS, 2, cfg).requires_grad


def microbatch(log_rho: list[float], advantages: list[float] | None = None) -> MicroBatch:
    """Build one sequence with sampler log-probability -3 for each token."""
    trajectory = make_trajectory(
        [1] * (len(log_rho) + 1), [0] + [1] * len(log_rho), logprobs=[-3.0] * len(log_rho)
    )
    own = None if advantages is None else np.array(advantages, dtype=np.float32)
    sample = Sample(trajectory=trajectory, advantage=1.0, own_advantages=own)
    return make_microbatches([sample], [0], max_tokens=99, device="cpu")[0]


def weighted_loss(
    log_rho: list[float], cfg: AlgorithmSection, advantages: list[float] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights [tokens], the loss's value and its gradient [tokens], at the sampler."""
    micro = microbatch(log_rho, advantages)
    new = (torch.tensor(log_rho) - 3.0).requires_grad_()
    anchor, weights = anchor_and_weights(
        new, new.detach(), micro, cfg, proximal=Proximal.SAMPLER, version=0
    )
    inputs = LossInputs(
        new_logprobs=new,
        anchor_logprobs=anchor,
        sampler_logprobs=micro.sampler_logprobs,
        advantages=micro.advantages,
        is_weights=weights,
        sequence_ids=micro.sequence_ids,
        num_sequences=1,
    )
    loss, _ = policy_loss(inputs, Denominator(num_tokens=1, num_sequences=1), cfg)
    loss.backward()
    assert new.grad is not None
    return weights, loss.detach(), new.grad


FAR = [
    1.2,
    -2.3,
    0.5,
    0.2,
]  # the product of the ratios is exp(-0.4), their geometric mean exp(-0.1)


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (Correction.NONE, 0.9048),
        (Correction.TOKEN_TIS, 0.9048),  # the sequence's ratio is below the cap: no token is cut
        (Correction.SEQUENCE_TIS, 0.6703),  # min(product, 2)
        (Correction.ICEPOP, 0.9048),
        (Correction.GEOMETRIC, 0.0),
    ],
)
def test_gspo_at_the_sampler_divides_by_the_sequence_ratio(
    correction: Correction, expected: float
) -> None:
    cfg = AlgorithmSection(policy_loss=PolicyLoss.GSPO, correction=correction)
    weights, loss, gradient = weighted_loss(FAR, cfg)
    assert (weights * math.exp(-0.1)).tolist() == pytest.approx([expected] * 4, abs=1e-4)
    assert loss.item() == pytest.approx(-4 * expected, abs=1e-3)
    assert gradient.tolist() == pytest.approx([-expected] * 4, abs=1e-4)


def test_gspo_at_the_sampler_is_capped_by_sequence() -> None:
    cfg = AlgorithmSection(policy_loss=PolicyLoss.GSPO)
    _, _, gradient = weighted_loss([log(2.0), log(3.125)], cfg, [-1.0, -1.0])  # s = 2.5, cap 2
    assert gradient.tolist() == pytest.approx([2.0, 2.0], rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.5, 1.28, 1.28, 1.28]),  # min(r, 1 + clip_high) for every r, truncated once
        ({"correction": Correction.NONE}, [0.5, 1.28, 1.28, 1.28]),
        ({"tis_cap": 1.1}, [0.5, 1.1, 1.1, 1.1]),
        ({"correction": Correction.ICEPOP}, [0.5, 1.28, 1.28, 0.0]),  # 40 is above mask_high
        ({"correction": Correction.SEQUENCE_TIS}, [1.28] * 4),  # The product is 120.
    ],
)
def test_cispo_bounds_weight_for_any_ratio(settings: dict, expected: list[float]) -> None:
    cfg = AlgorithmSection(policy_loss=PolicyLoss.CISPO, **settings)
    _, _, gradient = weighted_loss([log(0.5), log(2.0), log(3.0), log(40.0)], cfg)
    assert (-gradient).tolist() == pytest.approx(expected, rel=1e-5)


def test_kl_weights_follow_the_correction() -> None:
    new, micro = torch.tensor([log(0.5) - 3.0, log(5.0) - 3.0, -3.0]), microbatch([0.0] * 3)

    def of(correction: Correction) -> list[float]:
        return kl_weights(new, micro, AlgorithmSection(correction=correction)).tolist()

    assert of(Correction.TOKEN_TIS) == pytest.approx([0.5, 2.0, 1.0])
    assert of(Correction.ICEPOP) == pytest.approx([0.5, 5.0, 1.0])
    assert of(Correction.SEQUENCE_TIS) == pytest.approx([2.0] * 3)
    assert of(Correction.NONE) == [1.0] * 3


def test_negative_mask_hides_bad_actions_of_off_policy_episodes() -> None:
    log_rho = torch.tensor([-0.3, -0.1, -0.3])  # mean log(mu/pi): 0.2 and 0.3
    advantages = torch.tensor([-1.0, 1.0, -1.0])
    assert negative_mask(log_rho, advantages, ROWS, 2, delta=0.25).tolist() == [1.0, 1.0, 0.0]
    assert negative_mask(log_rho, advantages, ROWS, 2, delta=0.15).tolist() == [0.0, 1.0, 0.0]
    assert negative_mask(log_rho, advantages, ROWS, 2, delta=0.0).tolist() == [1.0, 1.0, 1.0]


def test_interpolated_policy_moves_with_the_lag() -> None:
    versions = torch.tensor([7, 6, 4])  # lag 0, 1, 3
    got = interpolated_logprobs(PI, MU, versions, 7)
    expected = [log(0.5), (log(0.1) + log(0.5)) / 2, log(0.4)]
    assert got.tolist() == pytest.approx(expected)
    far = interpolated_logprobs(torch.zeros(1), torch.tensor([-4.0]), torch.tensor([4]), 7)
    assert far.item() == pytest.approx(-1.0)  # three quarters of the way


def test_sequence_mean_averages_each_sequences_tokens() -> None:
    got = sequence_mean(torch.tensor([1.0, 2.0, 5.0]), ROWS, 3)
    assert got.tolist() == [1.5, 5.0, 0.0]


def test_log_ratio_is_bounded() -> None:
    got = log_ratio(torch.tensor([0.0, -500.0]), torch.tensor([-500.0, 0.0]))
    assert got.tolist() == [20.0, -20.0]


def test_log_ratio_refuses_to_broadcast() -> None:
    with pytest.raises(ValueError, match="one shape"):
        log_ratio(torch.zeros(3), torch.zeros(1))


def test_ess_matches_hand_computed_sums() -> None:
    got = sample_size_of(weight_moments(torch.tensor([1.0, 3.0])))
    assert got.item() == pytest.approx(16 / 20)


def test_ess_is_one_nth_for_one_dominating_weight() -> None:
    weights = torch.tensor([5e8, 1e-9, 1e-9, 1e-9])
    assert sample_size_of(weight_moments(weights)).item() == pytest.approx(0.25)


def test_statistics_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        ratio_statistics(torch.ones(0), torch.ones(0))


def test_ratio_statistics_match_hand_computed_numbers() -> None:
    got = ratio_statistics(PI, MU)
    assert got["offpolicy/ess_frac"] == pytest.approx(6.5**2 / (3 * 26.25))
    assert got["offpolicy/ratio_p50"] == pytest.approx(1.0)
    assert got["offpolicy/ratio_p99"] == pytest.approx(5.0)
    expected = ((0.5 - 1 - log(0.5)) + (5 - 1 - log(5))) / 3
    assert got["policy/kl_sampler"] == pytest.approx(expected, rel=1e-5)


def test_distance_is_split_into_arithmetic_and_versions() -> None:
    new = torch.tensor([-1.0, -1.0, -1.0])
    mu = torch.tensor([-1.01, -1.03, -1.42])
    got = lag_statistics(new, mu, torch.tensor([0, 0, 2]))
    assert got["offpolicy/noise_abs_logprob"] == pytest.approx(0.02, rel=1e-4)
    assert got["offpolicy/lag_abs_logprob"] == pytest.approx(0.40, rel=1e-4)
    assert got["offpolicy/num_same_version_tokens"] == 2.0
