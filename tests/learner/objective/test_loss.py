"""Laws of the policy loss, by hand-computed numbers."""

from dataclasses import replace
from math import exp, log
from typing import Any

import pytest
import torch
from torch import Tensor

from common.config.algorithm import Aggregation, AlgorithmSection, KlEstimator, PolicyLoss
from learner.algorithms.critic import value_loss
from learner.algorithms.interface import LossInputs
from learner.objective.loss import Denominator, kl_estimate, policy_loss

CFG = AlgorithmSection(clip_low=0.2, clip_high=0.28, dual_clip=3.0)
ANCHOR = -2.0


def loss_of(
    ratios: list[float],
    advantages: list[float],
    *,
    weights: list[float] | None = None,
    sequence_ids: list[int] | None = None,
    num_global_tokens: int = 1,
    num_global_sequences: int = 1,
    cfg: AlgorithmSection = CFG,
    **extra: Any,
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Return (loss, metrics, gradient) where pi_theta has the given ratios to its anchor."""
    new = torch.tensor([log(ratio) + ANCHOR for ratio in ratios], requires_grad=True)
    rows = sequence_ids or [0] * len(ratios)
    inputs = LossInputs(
        new_logprobs=new,
        anchor_logprobs=torch.full((len(ratios),), ANCHOR),
        sampler_logprobs=torch.full((len(ratios),), ANCHOR),
        advantages=torch.tensor(advantages),
        is_weights=torch.tensor(weights or [1.0] * len(ratios)),
        sequence_ids=torch.tensor(rows),
        num_sequences=max(rows) + 1,
        **extra,
    )
    denominator = Denominator(num_tokens=num_global_tokens, num_sequences=num_global_sequences)
    loss, metrics = policy_loss(inputs, denominator, cfg)
    loss.backward()
    assert new.grad is not None
    return loss, metrics, new.grad


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),  # At the anchor it is the plain policy gradient.
        (1.2, 1.0, -1.2, -1.2),  # inside the bounds
        (1.5, 1.0, -1.28, 0.0),  # good and already likelier: held
        (0.5, 1.0, -0.5, -0.5),  # good but less likely: pushed back up
        (0.5, -1.0, 0.8, 0.0),  # bad and already less likely: held
        (2.0, -1.0, 2.0, 2.0),  # bad but likelier: pushed down
        (5.0, -1.0, 3.0, 0.0),  # ... not without bound
    ],
)
def test_loss_of_one_token_matches_hand_computed_numbers(
    ratio: float, advantage: float, loss: float, gradient: float
) -> None:
    got, _, grad = loss_of([ratio], [advantage])
    assert got.item() == pytest.approx(loss, rel=1e-5)
    assert grad.item() == pytest.approx(gradient, rel=1e-5)


def test_dual_clip_zero_leaves_negative_advantages_unbounded() -> None:
    cfg = AlgorithmSection(dual_clip=0.0)
    got, _, grad = loss_of([5.0], [-1.0], cfg=cfg)
    assert got.item() == pytest.approx(5.0)
    assert grad.item() == pytest.approx(5.0)


def test_gspo_clips_geometric_mean_of_sequence() -> None:
    cfg = AlgorithmSection(policy_loss=PolicyLoss.GSPO)
    # s = sqrt(1.5 * 0.9) = 1.162 inside the bounds, although 1.5 alone is outside
    got, metrics, grad = loss_of([1.5, 0.9], [1.0, 1.0], cfg=cfg)
    s = (1.5 * 0.9) ** 0.5
    assert got.item() == pytest.approx(-2 * s, rel=1e-5)
    assert grad.tolist() == pytest.approx([-s, -s], rel=1e-5)
    assert metrics["policy/clipped_frac"].item() == 0.0
    held, _, still = loss_of([2.0, 0.9], [1.0, 1.0], cfg=cfg)  # s = 1.342
    assert held.item() == pytest.approx(-2 * 1.28)
    assert still.tolist() == [0.0, 0.0]


def test_gspo_loss_is_the_mean_over_sequences() -> None:
    cfg = AlgorithmSection(policy_loss=PolicyLoss.GSPO, aggregation=Aggregation.SEQUENCE)
    got, _, grad = loss_of(
        [1.5, 0.9, 2.0], [1.0, 1.0, -1.0], sequence_ids=[0, 0, 1], num_global_sequences=2, cfg=cfg
    )
    # Sequence 0: s = sqrt(1.5 * 0.9), inside the bounds. Sequence 1: s = 2, not clipped downwards.
    s = (1.5 * 0.9) ** 0.5
    assert got.item() == pytest.approx((-s + 2.0) / 2, rel=1e-5)
    assert grad.tolist() == pytest.approx([-s / 4, -s / 4, 1.0], rel=1e-5)


def test_turn_loss_clips_geometric_mean_of_each_turn() -> None:
    cfg = AlgorithmSection(policy_loss=PolicyLoss.TURN)
    turn_ids = torch.tensor([0, 0, 1, 1])
    got, metrics, grad = loss_of([1.5, 0.9, 2.0, 0.9], [1.0] * 4, cfg=cfg, turn_ids=turn_ids)
    # Turn 0: s = sqrt(1.5 * 0.9), inside the bounds. Turn 1: s = sqrt(2 * 0.9) = 1.342, clipped.
    s = (1.5 * 0.9) ** 0.5
    assert got.item() == pytest.approx(-2 * s - 2 * 1.28, rel=1e-5)
    assert grad.tolist() == pytest.approx([-s, -s, 0.0, 0.0], rel=1e-5)
    assert metrics["policy/clipped_frac"].item() == 2.0


def test_unclipped_loss_bounds_no_ratio() -> None:
    cfg = AlgorithmSection(policy_loss=PolicyLoss.UNCLIPPED)
    got, metrics, grad = loss_of([5.0, 5.0], [1.0, -2.0], cfg=cfg)
    assert got.item() == pytest.approx(-5.0 + 10.0, rel=1e-5)
    assert grad.tolist() == pytest.approx([-5.0, 10.0], rel=1e-5)
    assert metrics["policy/clipped_frac"].item() == 0.0


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    cfg = AlgorithmSection(policy_loss=PolicyLoss.CISPO)
    _, metrics, grad = loss_of([2.0, 0.5], [1.0, -1.0], cfg=cfg)
    assert grad.tolist() == pytest.approx([-1.28, 0.5], rel=1e-5)
    assert metrics["policy/clipped_frac"].item() == 1.0


def test_dppo_masks_large_probability_moves() -> None:
    cfg = AlgorithmSection(policy_loss=PolicyLoss.DPPO, dppo_delta=0.05)
    # mu = exp(-2) = 0.135; ratio 1.5 moves it by 0.068, ratio 1.3 by 0.041, ratio 0.5 by -0.068
    _, metrics, grad = loss_of([1.5, 1.3, 0.5, 0.5], [1.0, 1.0, -1.0, 1.0], cfg=cfg)
    assert grad.tolist() == pytest.approx([0.0, -1.3, 0.0, -0.5], rel=1e-5)
    assert metrics["policy/clipped_frac"].item() == 2.0


@pytest.mark.parametrize("kind", list(PolicyLoss))
def test_every_loss_has_the_plain_gradient_at_the_anchor(kind: PolicyLoss) -> None:
    _, _, grad = loss_of([1.0, 1.0], [2.0, -3.0], cfg=AlgorithmSection(policy_loss=kind))
    torch.testing.assert_close(grad, torch.tensor([-2.0, 3.0]))


def test_weights_scale_each_token_and_zeros_count_as_masked() -> None:
    got, metrics, grad = loss_of([1.0, 1.0, 1.0], [1.0, -1.0, 5.0], weights=[2.0, 0.5, 0.0])
    assert got.item() == pytest.approx(-2.0 + 0.5)
    assert grad.tolist() == pytest.approx([-2.0, 0.5, 0.0])
    assert metrics["policy/masked_frac"].item() == 1.0


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        (Aggregation.TOKEN, [-1 / 4, -1 / 4, -1 / 4, -1 / 4]),
        (Aggregation.SEQUENCE, [-1 / 6, -1 / 6, -1 / 6, -1 / 2]),
        (Aggregation.CONSTANT, [-1 / 20] * 4),
    ],
)
def test_aggregation_sets_weight_of_each_token(
    aggregation: Aggregation, expected: list[float]
) -> None:
    cfg = AlgorithmSection(aggregation=aggregation, constant_tokens=10)
    _, _, grad = loss_of(
        [1.0] * 4,
        [1.0] * 4,
        sequence_ids=[0, 0, 0, 1],
        num_global_tokens=4,
        num_global_sequences=2,
        cfg=cfg,
    )
    assert grad.tolist() == pytest.approx(expected)


def test_denominator_is_not_lowered_by_masking() -> None:
    _, _, whole = loss_of([1.0, 1.0], [1.0, 1.0], num_global_tokens=2)
    _, _, masked = loss_of([1.0, 1.0], [1.0, 1.0], weights=[1.0, 0.0], num_global_tokens=2)
    assert masked[0] == whole[0]


def test_microbatch_losses_add_up_to_the_batch_loss() -> None:
    ratios, advantages = [0.5, 1.1, 1.5, 2.0, 4.0], [1.0, -0.5, 2.0, -1.0, -2.0]
    whole, metrics, grad = loss_of(ratios, advantages, num_global_tokens=5)
    parts = [
        loss_of(ratios[a:b], advantages[a:b], num_global_tokens=5) for a, b in ((0, 1), (1, 5))
    ]
    assert abs(sum(part[0].item() for part in parts) - whole.item()) < 1e-6
    torch.testing.assert_close(torch.cat([part[2] for part in parts]), grad, atol=1e-7, rtol=0)
    for name, value in metrics.items():
        assert sum(part[1][name].item() for part in parts) == pytest.approx(value.item())


def test_clipped_share_counts_tokens_with_a_cut_gradient() -> None:
    _, metrics, grad = loss_of(
        [1.5, 1.5, 0.5, 0.5, 5.0], [1.0, -1.0, 1.0, -1.0, -1.0], num_global_tokens=5
    )
    assert metrics["policy/clipped_frac"].item() == pytest.approx(3 / 5)
    assert (grad == 0).tolist() == [True, False, False, True, True]


def test_entropy_bonus_lowers_the_loss_and_flattens() -> None:
    entropy = torch.tensor([2.0, 1.0], requires_grad=True)
    loss, metrics, _ = loss_of(
        [1.0, 1.0],
        [0.0, 0.0],
        num_global_tokens=2,
        cfg=AlgorithmSection(entropy_coef=0.1),
        entropy=entropy,
    )
    assert loss.item() == pytest.approx(-0.15)
    assert metrics["policy/entropy"].item() == pytest.approx(1.5)
    assert entropy.grad is not None
    assert entropy.grad.tolist() == pytest.approx([-0.05, -0.05])


def test_drift_pulls_back_to_the_sampler() -> None:
    cfg = AlgorithmSection(drift_coef=0.5)
    loss, metrics, grad = loss_of([exp(0.2)], [0.0], cfg=cfg)
    assert loss.item() == pytest.approx(0.5 * 0.04, rel=1e-4)
    assert metrics["policy/drift"].item() == pytest.approx(0.04, rel=1e-4)
    assert grad.item() == pytest.approx(0.5 * 2 * 0.2, rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "value", "gradient"),
    [
        (KlEstimator.K1, 0.5, 1.0),
        (KlEstimator.K2, 0.125, 0.5),
        (KlEstimator.K3, exp(-0.5) - 1 + 0.5, 1 - exp(-0.5)),
    ],
)
def test_kl_estimators_match_hand_computed_numbers(
    kind: KlEstimator, value: float, gradient: float
) -> None:
    new = torch.tensor([-1.0], requires_grad=True)
    got = kl_estimate(new, torch.tensor([-1.5]), kind)
    got.sum().backward()
    assert got.item() == pytest.approx(value, rel=1e-5)
    assert new.grad is not None
    assert new.grad.item() == pytest.approx(gradient, rel=1e-5)


def test_on_policy_kl_estimators_match_divergence() -> None:
    logits = torch.tensor([0.3, -1.2, 0.9, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.4, 0.5, 0.2, 1.0], dtype=torch.float64).log_softmax(0)
    new = logits.log_softmax(0)
    forward = (new.exp() * (new - reference)).sum()  # KL(pi | reference)
    backward = (reference.exp() * (reference - new)).sum()
    wanted = {
        KlEstimator.K1: torch.zeros(4, dtype=torch.float64),
        KlEstimator.K2: torch.autograd.grad(forward, logits, retain_graph=True)[0],
        KlEstimator.K3: torch.autograd.grad(backward, logits, retain_graph=True)[0],
    }
    for kind, gradient in wanted.items():
        # What samples of pi give on average; their distribution is not differentiated.
        mean = (new.exp().detach() * kl_estimate(new, reference, kind)).sum()
        (found,) = torch.autograd.grad(mean, logits, retain_graph=True)
        torch.testing.assert_close(found, gradient, atol=1e-6, rtol=0)
        if kind is not KlEstimator.K2:  # k2 is biased
            assert mean.item() == pytest.approx(forward.item(), abs=1e-6)


def test_reference_kl_enters_with_its_coefficient() -> None:
    cfg = AlgorithmSection(kl_coef=0.1, kl_estimator=KlEstimator.K2)
    reference = torch.tensor([ANCHOR - 0.5])
    loss, metrics, grad = loss_of([1.0], [0.0], cfg=cfg, reference_logprobs=reference)
    assert metrics["policy/kl_reference"].item() == pytest.approx(0.125)
    assert loss.item() == pytest.approx(0.0125)
    assert grad.item() == pytest.approx(0.05)


def test_kl_of_stale_tokens_is_weighted() -> None:
    cfg = AlgorithmSection(kl_coef=0.1, kl_estimator=KlEstimator.K2)
    reference, stale = torch.tensor([ANCHOR - 0.5] * 2), torch.tensor([2.0, 0.5])
    loss, _, grad = loss_of(
        [1.0, 1.0], [0.0] * 2, cfg=cfg, reference_logprobs=reference, kl_weights=stale
    )
    assert loss.item() == pytest.approx(0.1 * 2.5 * 0.125)
    assert grad.tolist() == pytest.approx([0.1, 0.025])


@pytest.mark.parametrize("term", ["entropy_coef", "kl_coef"])
def test_terms_without_their_input_are_refused(term: str) -> None:
    with pytest.raises(ValueError, match=f"{term}=0.1 needs the"):
        loss_of([1.0], [1.0], cfg=replace(AlgorithmSection(), **{term: 0.1}))


def test_loss_refuses_broadcasting_and_empty_denominators() -> None:
    ones = torch.ones(3)
    with pytest.raises(ValueError, match="one \\[tokens\\] shape"):
        LossInputs(
            new_logprobs=ones,
            anchor_logprobs=ones,
            sampler_logprobs=ones,
            advantages=ones[:1],
            is_weights=ones,
            sequence_ids=torch.zeros(3, dtype=torch.int64),
            num_sequences=1,
        )
    with pytest.raises(ValueError, match="nothing to train on"):
        Denominator(num_tokens=0, num_sequences=1)


def test_value_loss_takes_the_larger_of_both_errors() -> None:
    values = torch.tensor([1.0, 0.1], requires_grad=True)
    got = value_loss(
        values,
        torch.tensor([2.0, 2.0]),
        torch.tensor([0.0, 0.0]),
        torch.tensor([0.5, 0.5]),
        clip=0.2,
    )
    got.backward()
    # first: held at 0.2, error 3.24 > 1; second: inside, error 3.61
    assert got.item() == pytest.approx(0.5 * (0.5 * 3.24 + 0.5 * 3.61), rel=1e-5)
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0.0, -0.95], rel=1e-5)
