"""Laws of the divergence from a teacher, by hand-computed numbers."""

from math import log
from typing import Any

import pytest
import torch

from common.config.algorithm import AlgorithmSection, PolicyLoss, TeacherForm, TeacherSection
from learner.algorithms.interface import LossInputs
from learner.algorithms.teacher import sampled_divergence, topk_divergence, with_teacher
from learner.objective.loss import Denominator, policy_loss

SAMPLED = TeacherSection(path="t", coef=2.0)
TOPK = TeacherSection(path="t", coef=2.0, form=TeacherForm.TOPK, k=2)


def test_sampled_token_is_paid_for_its_own_divergence() -> None:
    rewards = torch.tensor([1.0, -1.0])
    new = torch.tensor([log(0.5), log(0.1)])
    teacher = torch.tensor([log(0.25), log(0.4)])
    alone = with_teacher(rewards, new, teacher, SAMPLED)
    assert alone.tolist() == pytest.approx([-2 * log(2), 2 * log(4)])
    beside = TeacherSection(path="t", coef=2.0, reward_coef=0.5)
    both = with_teacher(rewards, new, teacher, beside)
    assert both.tolist() == pytest.approx([0.5 - 2 * log(2), -0.5 + 2 * log(4)])


def test_sampled_advantage_has_no_gradient() -> None:
    new = torch.tensor([-1.0], requires_grad=True)
    taught = with_teacher(torch.zeros(1), new, torch.tensor([-2.0]), SAMPLED)
    assert not taught.requires_grad


def test_banned_token_costs_a_bounded_number() -> None:
    found = sampled_divergence(torch.tensor([-1.0]), torch.tensor([-9999.0]))
    assert found.tolist() == [20.0]


def test_topk_leaves_only_scaled_rewards_in_advantages() -> None:
    cfg = TeacherSection(path="t", form=TeacherForm.TOPK, reward_coef=3.0)
    rewards = torch.tensor([1.0, -1.0])
    assert with_teacher(rewards, rewards, None, cfg).tolist() == [3.0, -3.0]


def test_missing_scores_raise_instead_of_counting_zero() -> None:
    with pytest.raises(ValueError, match="needs the teacher's logprobs"):
        with_teacher(torch.zeros(1), torch.zeros(1), None, SAMPLED)


def test_topk_divergence_merges_all_other_tokens() -> None:
    # Four tokens: pi = (.4, .3, .2, .1), q = (.5, .25, .2, .05), and k = 2.
    pi = torch.tensor([[0.4, 0.3]]).log()
    q = torch.tensor([[0.5, 0.25]]).log()
    right = 0.4 * log(0.4 / 0.5) + 0.3 * log(0.3 / 0.25) + 0.3 * log(0.3 / 0.25)
    assert topk_divergence(pi, q).item() == pytest.approx(right, abs=1e-6)
    whole = right - 0.3 * log(0.3 / 0.25) + 0.2 * log(1.0) + 0.1 * log(0.1 / 0.05)
    assert right < whole


def test_topk_over_the_whole_vocabulary_is_the_kl() -> None:
    pi = torch.tensor([[0.7, 0.2, 0.1]]).log()
    q = torch.tensor([[0.2, 0.5, 0.3]]).log()
    right = 0.7 * log(3.5) + 0.2 * log(0.4) + 0.1 * log(1 / 3)
    assert topk_divergence(pi, q).item() == pytest.approx(right, abs=1e-5)


def test_gradient_of_topk_is_that_of_the_formula() -> None:
    """With logits z and D_v = log pi_v - log q_v, dKL/dz_v = pi_v * (D_v - KL)."""
    logits = torch.tensor([[0.3, -0.2, 0.1, 0.0]], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([0.5, 0.25, 0.2, 0.05], dtype=torch.float64)
    support = logits.log_softmax(-1)[:, :2]
    kl = topk_divergence(support, q[None, :2].log())
    kl.sum().backward()
    pi = logits.detach().softmax(-1)[0]
    rest = float(pi[2:].sum())
    gaps = [log(float(pi[0]) / 0.5), log(float(pi[1]) / 0.25), *[log(rest / 0.25)] * 2]
    right = [float(p) * (gap - kl.item()) for p, gap in zip(pi, gaps, strict=True)]
    assert logits.grad is not None
    assert logits.grad[0].tolist() == pytest.approx(right, abs=1e-9)


def test_topk_bounds_a_remainder_that_fp32_cannot_show() -> None:
    """The teacher's remainder is 9e-9, and its fp32 sum of probabilities is 1."""
    q = torch.tensor([[1.0 - 1e-6 - 9e-9, 1e-6]], dtype=torch.float64).log()
    pi = torch.tensor([[0.44, 0.2]], dtype=torch.float64).log()
    right = 0.44 * log(0.44) + 0.2 * log(0.2 / 1e-6) + 0.36 * log(0.36 / 1e-7)
    for dtype in (torch.float32, torch.float64):  # Precision does not change the value.
        assert topk_divergence(pi.to(dtype), q.to(dtype)).item() == pytest.approx(right, abs=1e-4)


def test_topk_gradient_below_the_smallest_remainder_is_that_of_the_formula() -> None:
    logits = torch.tensor([[1.0, 0.0, 0.5]], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([[1.0 - 9e-9, 8e-9]], dtype=torch.float64)
    kl = topk_divergence(logits.log_softmax(-1)[:, :2], q.log())
    kl.sum().backward()
    pi = [float(p) for p in logits.detach().softmax(-1)[0]]
    gaps = [log(pi[0] / (1 - 9e-9)), log(pi[1] / 8e-9), log(pi[2] / 1e-7)]
    assert kl.item() == pytest.approx(sum(p * gap for p, gap in zip(pi, gaps, strict=True)))
    assert logits.grad is not None
    right = [p * (gap - kl.item()) for p, gap in zip(pi, gaps, strict=True)]
    assert logits.grad[0].tolist() == pytest.approx(right, abs=1e-9)


def test_equal_policies_have_no_divergence() -> None:
    same = torch.tensor([[0.6, 0.3]]).log().requires_grad_()
    kl = topk_divergence(same, same.detach())
    assert kl.item() == pytest.approx(0.0, abs=1e-6)


def inputs_of(new: torch.Tensor, **columns: Any) -> LossInputs:
    zeros = torch.zeros(len(new))
    return LossInputs(
        new_logprobs=new,
        anchor_logprobs=new.detach(),
        sampler_logprobs=new.detach(),
        advantages=columns.pop("advantages", zeros),
        is_weights=torch.ones(len(new)),
        sequence_ids=torch.zeros(len(new), dtype=torch.int64),
        num_sequences=1,
        **columns,
    )


@pytest.mark.parametrize("kind", [PolicyLoss.PPO, PolicyLoss.CISPO, PolicyLoss.UNCLIPPED])
def test_sampled_gradient_on_policy_is_that_of_the_kl(kind: PolicyLoss) -> None:
    new = torch.tensor([log(0.5), log(0.1)], requires_grad=True)
    teacher = torch.tensor([log(0.25), log(0.4)])
    advantages = with_teacher(torch.zeros(2), new, teacher, SAMPLED)
    cfg = AlgorithmSection(teacher=SAMPLED, policy_loss=kind)
    inputs = inputs_of(new, advantages=advantages, teacher_logprobs=teacher)
    loss, metrics = policy_loss(inputs, Denominator(num_tokens=2, num_sequences=1), cfg)
    loss.backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([2 * log(2) / 2, -2 * log(4) / 2], rel=1e-5)
    assert metrics["teacher/kl"].item() == pytest.approx((log(2) - log(4)) / 2, rel=1e-5)


def test_topk_term_is_added_with_its_coefficient() -> None:
    new = torch.tensor([log(0.4)], requires_grad=True)
    support = torch.tensor([[0.4, 0.3]]).log().requires_grad_()
    q = torch.tensor([[0.5, 0.25]]).log()
    cfg = AlgorithmSection(teacher=TOPK)
    inputs = inputs_of(new, support_logprobs=support, teacher_top=q)
    loss, metrics = policy_loss(inputs, Denominator(num_tokens=1, num_sequences=1), cfg)
    kl = 0.4 * log(0.8) + 0.6 * log(1.2)
    assert loss.item() == pytest.approx(2 * kl, rel=1e-4)
    assert metrics["teacher/kl"].item() == pytest.approx(kl, rel=1e-4)
