"""Laws of the policy loss."""

from math import log

import pytest
import torch
from torch import Tensor

from common.config import Aggregation, AlgorithmSection, CreditLevel, LearnerSection
from learner.loss import clipped_policy_loss, is_anchored_at_sampler, objective_text

CFG = AlgorithmSection(clip_low=0.2, clip_high=0.28, dual_clip=3.0, tis_cap=2.0)


def loss_of(
    ratios: list[float],
    advantages: list[float],
    *,
    weights: list[float] | None = None,
    num_global_tokens: int = 1,
    cfg: AlgorithmSection = CFG,
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Return (loss, metrics, gradient) where pi_theta has the given ratios to its anchor."""
    new = torch.tensor([log(ratio) - 2.0 for ratio in ratios], requires_grad=True)
    loss, metrics = clipped_policy_loss(
        new,
        torch.full((len(ratios),), -2.0),
        torch.tensor(advantages),
        is_weights=None if weights is None else torch.tensor(weights),
        entropy=None,
        num_global_tokens=num_global_tokens,
        cfg=cfg,
    )
    loss.backward()
    assert new.grad is not None
    return loss, metrics, new.grad


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),  # on the anchor: plain policy gradient
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


def test_weights_scale_each_token() -> None:
    got, _, grad = loss_of([1.0, 1.0], [1.0, -1.0], weights=[2.0, 0.5])
    assert got.item() == pytest.approx(-2.0 + 0.5)
    assert grad.tolist() == pytest.approx([-2.0, 0.5])


def test_loss_of_microbatches_adds_up_to_loss_of_batch() -> None:
    ratios, advantages = [0.5, 1.1, 1.5, 2.0, 4.0], [1.0, -0.5, 2.0, -1.0, -2.0]
    whole, metrics, grad = loss_of(ratios, advantages, num_global_tokens=5)
    parts = [
        loss_of(ratios[a:b], advantages[a:b], num_global_tokens=5) for a, b in ((0, 1), (1, 5))
    ]
    assert abs(sum(part[0].item() for part in parts) - whole.item()) < 1e-6
    torch.testing.assert_close(torch.cat([part[2] for part in parts]), grad, atol=1e-7, rtol=0)
    for name, value in metrics.items():
        assert sum(part[1][name].item() for part in parts) == pytest.approx(value.item())


def test_clipped_share_counts_tokens_whose_gradient_is_cut() -> None:
    _, metrics, grad = loss_of(
        [1.5, 1.5, 0.5, 0.5, 5.0], [1.0, -1.0, 1.0, -1.0, -1.0], num_global_tokens=5
    )
    assert metrics["policy/clipped_frac"].item() == pytest.approx(3 / 5)
    assert (grad == 0).tolist() == [True, False, False, True, True]


def test_entropy_bonus_lowers_the_loss_and_flattens() -> None:
    cfg = AlgorithmSection(entropy_coef=0.1)
    entropy = torch.tensor([2.0, 1.0], requires_grad=True)
    zeros = torch.zeros(2)
    loss, metrics = clipped_policy_loss(
        zeros, zeros, zeros, is_weights=None, entropy=entropy, num_global_tokens=2, cfg=cfg
    )
    loss.backward()
    assert loss.item() == pytest.approx(-0.15)
    assert metrics["policy/entropy"].item() == pytest.approx(1.5)
    assert entropy.grad is not None
    assert entropy.grad.tolist() == pytest.approx([-0.05, -0.05])


def test_entropy_bonus_without_entropy_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the entropy"):
        loss_of([1.0], [1.0], cfg=AlgorithmSection(entropy_coef=0.1))


def test_loss_refuses_to_broadcast() -> None:
    ones = torch.ones(3)
    with pytest.raises(ValueError, match="one \\[tokens\\] shape"):
        clipped_policy_loss(
            ones, ones, ones[:1], is_weights=None, entropy=None, num_global_tokens=3, cfg=CFG
        )


def test_ratio_is_taken_to_the_sampler_only_with_one_update_per_batch() -> None:
    assert is_anchored_at_sampler(LearnerSection())
    assert not is_anchored_at_sampler(LearnerSection(num_minibatches=2))
    assert not is_anchored_at_sampler(LearnerSection(ppo_epochs=2))


def test_objective_text_states_the_form_and_its_numbers() -> None:
    assert objective_text(CFG, LearnerSection()) == (
        "maximise mean_tokens w*[min(r*A, clip(r, 0.8, 1.28)*A), at least 3*A if A<0]"
        "; r=pi/mu, w=min(1, 2/r), A=(R - leave_one_out); 1 update per batch"
    )
    decoupled = objective_text(CFG, LearnerSection(ppo_epochs=2, num_minibatches=4))
    assert "r=pi/pi_prox, w=min(pi_prox/mu, 2)" in decoupled
    assert decoupled.endswith("2 epochs x 4 minibatches")


def test_objective_text_omits_what_is_switched_off_and_names_what_is_on() -> None:
    cfg = AlgorithmSection(
        dual_clip=0.0, tis_cap=0.0, entropy_coef=0.01, invalid_action_penalty=0.2
    )
    assert objective_text(cfg, LearnerSection()) == (
        "maximise mean_tokens min(r*A, clip(r, 0.8, 1.28)*A) + 0.01*H; "
        "r=pi/mu, A=((R - 0.2*invalid_frac) - leave_one_out); 1 update per batch"
    )


def test_objective_text_tells_where_weight_and_penalty_lie() -> None:
    cfg = AlgorithmSection(
        aggregation=Aggregation.SEQUENCE,
        turn_discount=0.9,
        invalid_action_penalty=0.3,
        invalid_action_level=CreditLevel.TURN,
    )
    text = objective_text(cfg, LearnerSection())
    assert text.startswith("maximise mean_episodes mean_tokens ")
    assert "A=(R*0.9^(turns-1) - leave_one_out) - 0.3*(invalid_turn - group_mean)" in text
