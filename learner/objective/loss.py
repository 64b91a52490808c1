"""The policy loss. Pure functions on tensors.

Symbols: r = pi_theta / pi_anchor, A is the advantage, w is the importance weight, a is the
aggregation's weight of a token, and D is its denominator. The weight a and D belong to the whole
minibatch and are computed before masking.

    loss = -(1/D) sum_tokens
        a * (w * f(r, A) + entropy_coef * H - kl_coef * v * KL - drift_coef * d^2 - T)

    ppo    f = min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), at least dual_clip * A if A < 0
    gspo   the same with s = exp(mean over the sequence of log r) for every token of it (the
           token form: equal to the sequence form where A is constant over the sequence)
    turn   the same with s the geometric mean of r over each turn
    cispo  f = detach(min(r, 1 + clip_high)) * A * log pi_theta
    dppo   f = r A, but 0 where A > 0 and pi - mu > dppo_delta, or A < 0 and pi - mu < -dppo_delta
    unclipped  f = r A
    d      log pi_theta - log mu
    v      pi_theta / mu after `correction`: mu sampled the tokens that estimate the KL
    T      the teacher's term, see `learner/objective/teacher.py`; 0 without form=topk

The anchor is the sampler mu or a proximal policy, see `Proximal`. If a batch makes one update,
pi_prox equals pi_theta: the ratio to it is always one and no clip would ever bind. Therefore the
sampler is the anchor in this case. The trust region then limits how far the policy may move from
the sampler. Importance weights never include a ratio that f already contains.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from common.config.algorithm import (
    Aggregation,
    AlgorithmSection,
    KlEstimator,
    PolicyLoss,
    TeacherForm,
    TeacherSection,
)
from learner.objective.correction import log_ratio, mean_over, sequence_mean
from learner.objective.teacher import sampled_divergence, topk_divergence

METRIC_OF = {"teacher": "teacher/kl"}  # Term -> metric; the others are below `policy/`.


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The sampled tokens of one microbatch. Other tokens are absent, so no mask is needed."""

    new_logprobs: Tensor = field(repr=False)  # [tokens] nats, current policy, with gradient
    anchor_logprobs: Tensor = field(repr=False)  # [tokens] nats, denominator of the ratio
    sampler_logprobs: Tensor = field(repr=False)  # [tokens] nats of mu
    advantages: Tensor = field(repr=False)  # [tokens]
    is_weights: Tensor = field(repr=False)  # [tokens] importance weights, masks included
    sequence_ids: Tensor = field(repr=False)  # [tokens] int64 in [0, num_sequences)
    num_sequences: int
    entropy: Tensor | None = field(repr=False, default=None)  # [tokens] nats, with gradient
    reference_logprobs: Tensor | None = field(repr=False, default=None)  # [tokens] nats
    # [tokens] int64; None: one turn for each sequence
    turn_ids: Tensor | None = field(repr=False, default=None)
    num_turns: int | None = None  # Above all of `turn_ids`; None: the loss reads the largest.
    kl_weights: Tensor | None = field(repr=False, default=None)  # [tokens] v above; None: 1
    # [tokens] nats of the teacher at the sampled tokens, with form=sampled
    teacher_logprobs: Tensor | None = field(repr=False, default=None)
    # [tokens, k] nats at the teacher's most probable tokens, with form=topk
    teacher_top: Tensor | None = field(repr=False, default=None)
    # [tokens, k] nats of the current policy at these tokens, with gradient
    support_logprobs: Tensor | None = field(repr=False, default=None)
    # [sequence] sampled tokens in all rows of the episode; None: each sequence is an episode
    episode_tokens: Tensor | None = field(repr=False, default=None)

    def __post_init__(self) -> None:
        logprobs = (self.new_logprobs, self.anchor_logprobs, self.sampler_logprobs)
        others = (self.advantages, self.is_weights, self.sequence_ids)
        shapes = {tuple(each.shape) for each in (*logprobs, *others)}
        if len(shapes) != 1 or self.new_logprobs.ndim != 1:
            raise ValueError(f"inputs must share one [tokens] shape, got {sorted(shapes)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Denominator:
    """Divisors of a minibatch's sum over tokens; counted before masking."""

    num_tokens: int
    num_sequences: int  # Number of episodes, independent of their rows.

    def __post_init__(self) -> None:
        if self.num_tokens < 1 or self.num_sequences < 1:
            raise ValueError(f"the minibatch has nothing to train on: {self}")


def policy_loss(
    inputs: LossInputs, denominator: Denominator, cfg: AlgorithmSection
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of the formula at the top of this module, and its metrics.

    The denominator counts the whole minibatch, not this microbatch. The losses of microbatches and
    of data-parallel ranks therefore add up to the loss of the whole.

    Args:
        denominator: counts of the minibatch, over all microbatches and ranks.

    Returns:
        (loss, metrics): scalars. Metrics are sums over tokens / num_tokens, so their sum over
        microbatches is the minibatch's mean.

    Raises:
        ValueError: the entropy or the reference is missing and its coefficient is not 0.

    Source: PPO, arXiv:1707.06347; clip-higher, DAPO, arXiv:2503.14476; dual clip, arXiv:1912.09729;
    GSPO, arXiv:2507.18071; turn's ratio, GAGPO, arXiv:2605.13217; CISPO, arXiv:2506.13585; constant
    denominator, Dr. GRPO, arXiv:2503.20783; decoupled anchor, arXiv:2110.00641.
    """
    surrogate, is_bound = _surrogate(inputs, cfg)
    weights = inputs.is_weights.detach()
    scale = _token_scale(inputs, denominator, cfg)  # [tokens]
    num_tokens = denominator.num_tokens
    policy = -(scale * weights * surrogate).sum()
    metrics = {
        "loss/policy": policy.detach(),
        "policy/clipped_frac": is_bound.sum() / num_tokens,
        "policy/masked_frac": (weights == 0).sum() / num_tokens,
        "policy/weight_mean": weights.sum() / num_tokens,
    }
    loss = policy
    for name, coefficient, values in _extra_terms(inputs, cfg):
        metrics[METRIC_OF.get(name, f"policy/{name}")] = values.detach().sum() / num_tokens
        if coefficient != 0:
            if name == "kl_reference" and inputs.kl_weights is not None:
                values = inputs.kl_weights.detach() * values
            loss = loss + coefficient * (scale * values).sum()
    return loss, metrics


def metric_names(cfg: AlgorithmSection) -> list[str]:
    """Return the names of the metrics of `policy_loss`, in its order."""
    names = ["loss/policy", "policy/clipped_frac", "policy/masked_frac", "policy/weight_mean"]
    names.append("policy/entropy")
    if cfg.kl_coef != 0:
        names.append("policy/kl_reference")
    if cfg.drift_coef != 0:
        names.append("policy/drift")
    if cfg.teacher.is_on:
        names.append(METRIC_OF["teacher"])
    return names


def _extra_terms(inputs: LossInputs, cfg: AlgorithmSection) -> list[tuple[str, float, Tensor]]:
    """Return (name, coefficient in the loss, value [tokens]) of the terms beside the surrogate."""
    if cfg.entropy_coef != 0 and inputs.entropy is None:
        raise ValueError(f"entropy_coef={cfg.entropy_coef} needs the entropy of each token")
    if cfg.kl_coef != 0 and inputs.reference_logprobs is None:
        raise ValueError(f"kl_coef={cfg.kl_coef} needs the logprobs of the reference")
    entropy = -inputs.new_logprobs.detach() if inputs.entropy is None else inputs.entropy
    terms = [("entropy", -cfg.entropy_coef, entropy)]
    if inputs.reference_logprobs is not None:
        kl = kl_estimate(inputs.new_logprobs, inputs.reference_logprobs, cfg.kl_estimator)
        terms.append(("kl_reference", cfg.kl_coef, kl))
    if cfg.drift_coef != 0:
        drift = log_ratio(inputs.new_logprobs, inputs.sampler_logprobs) ** 2
        terms.append(("drift", cfg.drift_coef, drift))
    if cfg.teacher.is_on:
        terms.append(_teacher_term(inputs, cfg.teacher))
    return terms


def _teacher_term(inputs: LossInputs, cfg: TeacherSection) -> tuple[str, float, Tensor]:
    """Return the teacher's term; the advantages already contain that of form=sampled."""
    if cfg.form is TeacherForm.TOPK:
        if inputs.teacher_top is None or inputs.support_logprobs is None:
            raise ValueError("form=topk needs the logprobs of teacher and policy at its tokens")
        return "teacher", cfg.coef, topk_divergence(inputs.support_logprobs, inputs.teacher_top)
    if inputs.teacher_logprobs is None:
        raise ValueError("form=sampled needs the teacher's logprobs of the sampled tokens")
    kl = sampled_divergence(inputs.new_logprobs.detach(), inputs.teacher_logprobs)
    return "teacher", 0.0, kl


def kl_estimate(new_logprobs: Tensor, reference_logprobs: Tensor, kind: KlEstimator) -> Tensor:
    """Return per-token estimates of KL(pi | reference) for tokens that pi sampled.

    With d = log pi - log reference: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d.

    Args:
        new_logprobs: [tokens] nats, with gradient. As a loss, k1 has a gradient of mean zero: it
            only measures the KL, while k2 and k3 reduce it.
        reference_logprobs: [tokens] nats.

    Returns:
        [tokens]; k2 and k3 are never negative.

    Source: Schulman, "Approximating KL divergence", 2020.
    """
    delta = log_ratio(new_logprobs, reference_logprobs.detach())
    if kind is KlEstimator.K1:
        return delta
    if kind is KlEstimator.K2:
        return delta**2 / 2
    return torch.exp(-delta) - 1 + delta


def _surrogate(inputs: LossInputs, cfg: AlgorithmSection) -> tuple[Tensor, Tensor]:
    """Return f(r, A) and whether a bound determines it, both [tokens]."""
    log_r = log_ratio(inputs.new_logprobs, inputs.anchor_logprobs)
    advantages = inputs.advantages
    if cfg.policy_loss is PolicyLoss.CISPO:
        ratio = log_r.detach().exp()
        limited = ratio.clamp(max=1 + cfg.clip_high)
        return limited * advantages * inputs.new_logprobs, limited != ratio
    if cfg.policy_loss is PolicyLoss.DPPO:
        moved = (inputs.new_logprobs.exp() - inputs.sampler_logprobs.exp()).detach()
        too_far = torch.where(advantages > 0, moved, -moved) > cfg.dppo_delta
        return log_r.exp() * advantages * ~too_far, too_far
    if cfg.policy_loss is PolicyLoss.UNCLIPPED:
        plain = log_r.exp() * advantages
        return plain, torch.zeros_like(plain, dtype=torch.bool)
    if cfg.policy_loss is PolicyLoss.TURN:
        is_single = inputs.turn_ids is None
        turns = inputs.sequence_ids if inputs.turn_ids is None else inputs.turn_ids
        num_turns = inputs.num_sequences if is_single else inputs.num_turns
        mean = mean_over(log_r.detach(), turns, num_turns)
        log_r = mean + inputs.new_logprobs - inputs.new_logprobs.detach()
    if cfg.policy_loss is PolicyLoss.GSPO:
        # The value belongs to the sequence, the gradient to each token: advantages may differ by
        # turn.
        mean = sequence_mean(log_r.detach(), inputs.sequence_ids, inputs.num_sequences)
        log_r = mean[inputs.sequence_ids] + inputs.new_logprobs - inputs.new_logprobs.detach()
    ratio = log_r.exp()
    plain = ratio * advantages
    clipped = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    surrogate = torch.minimum(plain, clipped * advantages)
    if cfg.dual_clip > 0:
        floored = torch.maximum(surrogate, cfg.dual_clip * advantages)
        surrogate = torch.where(advantages < 0, floored, surrogate)
    return surrogate, surrogate != plain


def _token_scale(inputs: LossInputs, denominator: Denominator, cfg: AlgorithmSection) -> Tensor:
    """Return the factor of each token's term, [tokens]; see `Aggregation`."""
    ones = torch.ones_like(inputs.advantages)
    if cfg.aggregation is Aggregation.TOKEN:
        return ones / denominator.num_tokens
    if cfg.aggregation is Aggregation.CONSTANT:
        return ones / (denominator.num_sequences * cfg.constant_tokens)
    counts = inputs.episode_tokens
    if counts is None:
        counts = ones.new_zeros(inputs.num_sequences).index_add(0, inputs.sequence_ids, ones)
    return 1.0 / (counts[inputs.sequence_ids] * denominator.num_sequences)


def value_loss(
    values: Tensor, targets: Tensor, old_values: Tensor, weights: Tensor, *, clip: float
) -> Tensor:
    """Return the weighted mean squared error of the critic, with PPO's clipping.

    0.5 * max((V - target)^2, (old + clamp(V - old, -clip, clip) - target)^2)

    Args:
        values: [entry] with gradient.
        targets: [entry].
        old_values: [entry], the critic's values before the step.
        weights: [entry], with sum one over the whole minibatch.
        clip: 0 disables clipping.

    Source: arXiv:1707.06347; its reference implementation.
    """
    error = (values - targets) ** 2
    if clip > 0:
        held = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (held - targets) ** 2)
    return 0.5 * (weights * error).sum()
