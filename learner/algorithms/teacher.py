"""Reverse KL divergence of the policy from its teacher, token by token. Pure functions on tensors.

Symbols: pi is the policy, q the teacher, S the k tokens that the teacher finds most probable.

    sampled  A = reward_coef * A_reward + coef * (log q - log sg(pi))   of each sampled token
    topk     A = reward_coef * A_reward, and the loss has the term coef * KL with
             KL = sum_S pi * (log pi - log q) + pi_rest * (log pi_rest - log q_rest)
             where pi_rest = 1 - sum_S pi and q_rest = max(1 - sum_S q, 1e-7)

The sampled form is the policy gradient of the reverse KL with a discount of 0: a token is paid for
its own divergence only. pi is the policy that is updated, so the estimate does not depend on the
lag of the sampler. The importance weights of the surrogate correct for the sampler.
The topk form merges all other tokens into one. Its value is therefore at most the whole KL, and 0
only if both policies agree on S. Its states are those that the sampler visited. A sum of fp32
probabilities cannot show a remainder below about 1e-7: such a remainder of the policy counts as 0,
and such a remainder of the teacher as 1e-7.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.config.algorithm import TeacherForm, TeacherSection
from learner.algorithms.interface import log_ratio

if TYPE_CHECKING:
    from torch import Tensor

# A smaller logprob of the teacher at one token counts as this one in the topk form.
MIN_LOGPROB = -30.0  # nats
# Smallest probability of a remainder. Rounding of fp32 sums hides smaller ones: it turns 9e-9 into
# 0, whose logarithm would be the largest penalty of all.
MIN_REST = 1e-7


def with_teacher(
    advantages: Tensor, new_logprobs: Tensor, teacher_logprobs: Tensor | None, cfg: TeacherSection
) -> Tensor:
    """Return the advantages [tokens] of rewards and teacher, without gradient.

    Args:
        advantages: [tokens] of the rewards.
        new_logprobs: [tokens] nats, current policy.
        teacher_logprobs: [tokens] nats of the sampled tokens; None with form=topk.

    Raises: ValueError: form=sampled, and the teacher's logprobs are missing.

    Source: on-policy distillation, arXiv:2306.13649; as a reward per token, arXiv:2306.08543.
    """
    scaled = cfg.reward_coef * advantages
    if cfg.form is TeacherForm.TOPK:
        return scaled
    if teacher_logprobs is None:
        raise ValueError("algorithm.teacher.form=sampled needs the teacher's logprobs of the batch")
    return scaled - cfg.coef * sampled_divergence(new_logprobs.detach(), teacher_logprobs)


def sampled_divergence(new_logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """Return log pi - log q [tokens] nats of sampled tokens; its mean estimates KL(pi | q).

    It is bounded to +-20: a token that the teacher bans has the logprob -inf.
    """
    return log_ratio(new_logprobs, teacher_logprobs)


def topk_divergence(support_logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """Return the KL [tokens] nats of the topk form, with gradient in `support_logprobs`.

    Args:
        support_logprobs: [tokens, k] nats of the policy at the tokens S.
        teacher_logprobs: [tokens, k] nats of the teacher at the same tokens.
    """
    log_q = teacher_logprobs.detach()
    log_rest_q = (1 - log_q.exp().sum(-1)).clamp(min=MIN_REST).log()
    rest = (1 - support_logprobs.exp().sum(-1)).clamp(min=MIN_REST)
    inside = support_logprobs.exp() * (support_logprobs - log_q.clamp(min=MIN_LOGPROB))
    outside = rest * (rest.log() - log_rest_q)
    return inside.sum(-1) + outside.where(rest > MIN_REST, 0.0)


def name_of(cfg: TeacherSection) -> str:
    return cfg.path or f"{cfg.model} at {cfg.url}"


def taught_formula(advantage: str, cfg: TeacherSection) -> str:
    """Return the formula of A with the part of a teacher, given that of the rewards."""
    if not cfg.is_on:
        return advantage
    parts = [f"{cfg.reward_coef:g}*({advantage})"] if cfg.reward_coef else []
    if cfg.form is TeacherForm.SAMPLED:
        parts.append(f"{cfg.coef:g}*(log {name_of(cfg)} - log sg(pi))")
    return " + ".join(parts) or "0"


def term_formula(cfg: TeacherSection) -> str:
    """Return the formula of the teacher's term in the loss; "" without one."""
    return f"{cfg.coef:g}*KL_top{cfg.k}(pi|{name_of(cfg)})" if cfg.num_top and cfg.is_on else ""
