"""The loss of the policy, and the weights of its tokens. Pure functions on tensors.

Symbols: f is the surrogate of `learner/algorithms`, A is the advantage, w is the importance weight,
a is the aggregation's weight of a token, and D is its denominator. The weight a and D belong to the
whole minibatch and are computed before masking.

    loss = -(1/D) sum_tokens
        a * (w * f(r, A) + entropy_coef * H - kl_coef * v * KL - drift_coef * d^2 - T)

    r      pi_theta / pi_anchor
    w      the weight of `algorithm.correction`, see `anchor_and_weights`
    d      log pi_theta - log mu
    v      pi_theta / mu after `correction`: mu sampled the tokens that estimate the KL
    T      the teacher's term, see `learner/algorithms/teacher.py`; 0 without form=topk

The anchor is the sampler mu or a proximal policy, see `Proximal`. If a batch makes one update,
pi_prox equals pi_theta: the ratio to it is always one and no clip would ever bind. Therefore the
sampler is the anchor in this case. The trust region then limits how far the policy may move from
the sampler. Importance weights never include a ratio that f already contains.

Source: constant denominator, Dr. GRPO, arXiv:2503.20783; decoupled anchor, arXiv:2110.00641.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from common.config.algorithm import (
    Aggregation,
    AlgorithmSection,
    KlEstimator,
    Proximal,
    TeacherForm,
    TeacherSection,
)
from learner.algorithms.interface import (
    MAX_LOG_RATIO,
    LossInputs,
    Unit,
    log_ratio,
    mean_over,
    sequence_mean,
)
from learner.algorithms.table import surrogate_of, weight_of
from learner.algorithms.teacher import sampled_divergence, topk_divergence
from learner.batch.batching import MicroBatch

METRIC_OF = {"teacher": "teacher/kl"}  # Term -> metric; the others are below `policy/`.


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
    """
    token_losses, is_bound = _token_losses(inputs, cfg)
    weights = inputs.is_weights.detach()
    scale = _token_scale(inputs, denominator, cfg)  # [tokens]
    num_tokens = denominator.num_tokens
    policy = (scale * weights * token_losses).sum()
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


def _token_losses(inputs: LossInputs, cfg: AlgorithmSection) -> tuple[Tensor, Tensor]:
    """Return -f(r, A) and whether a bound determines it, both [tokens]."""
    losses = surrogate_of(cfg).loss(inputs, cfg)
    if isinstance(losses, Tensor):
        return losses, torch.zeros_like(losses, dtype=torch.bool)
    return losses


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


def anchor_and_weights(
    new_logprobs: Tensor,
    before: Tensor,
    micro: MicroBatch,
    cfg: AlgorithmSection,
    *,
    proximal: Proximal,
    version: int,
) -> tuple[Tensor, Tensor]:
    """Return the anchor of the surrogate's ratio, and the weight of each token's surrogate.

    Args:
        new_logprobs: [tokens] nats, current policy.
        before: [tokens] nats, policy before the step, or at the sample's first update.
        proximal: never AUTO, see `proximal_in_use`.
        version: version of the weights before the step.

    Returns:
        ([tokens] nats, [tokens] >= 0 without gradient). With the sampler as anchor, the surrogates
        of GSPO and `turn` contain no ratio of a single token. The weights are then those of the
        sequences' or the turns' ratios. The mask of correction=second_moment over a whole batch is
        not included.
    """
    mu = micro.sampler_logprobs
    sequences = (micro.sequence_ids, micro.num_sequences)
    is_ratio_included = proximal is Proximal.SAMPLER
    anchor = before
    if proximal is Proximal.SAMPLER:
        anchor = mu
    elif proximal is Proximal.INTERPOLATED:
        anchor = interpolated_logprobs(new_logprobs, mu, micro.versions, version)
    log_rho = log_ratio((new_logprobs if is_ratio_included else anchor).detach(), mu)
    unit = surrogate_of(cfg).unit
    if is_ratio_included and unit is Unit.SEQUENCE:
        log_rho = sequence_mean(log_rho, *sequences)[micro.sequence_ids]
    if is_ratio_included and unit is Unit.TURN:
        log_rho = mean_over(log_rho, micro.turn_ids, micro.num_turns)
    weights = importance_weights(log_rho, *sequences, cfg, is_ratio_included=is_ratio_included)
    return anchor, weights * negative_mask(
        log_ratio(before, mu), micro.advantages, *sequences, delta=cfg.negative_mask_delta
    )


def importance_weights(
    log_rho: Tensor,
    sequence_ids: Tensor,
    num_sequences: int,
    cfg: AlgorithmSection,
    *,
    is_ratio_included: bool,
) -> Tensor:
    """Return the weight of each token's surrogate, [tokens] >= 0, without gradient.

    Args:
        is_ratio_included: the surrogate's own ratio already is rho (its anchor is the sampler). The
            weight is then corrected(rho) / rho, so that the product is corrected(rho). A
            mask only keeps or removes a token, so the surrogate's ratio does not change. CISPO
            limits its ratio itself: the product is min(corrected(rho), 1 + clip_high).
    """
    weights = corrected(log_rho, sequence_ids, num_sequences, cfg)
    if not is_ratio_included or weight_of(cfg).is_mask:
        return weights
    rho = log_rho.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if (limit := surrogate_of(cfg).limit) is not None:
        weights = weights.clamp(max=limit(cfg))
        rho = rho.clamp(max=limit(cfg))
    return weights / rho


def corrected(
    log_rho: Tensor, sequence_ids: Tensor, num_sequences: int, cfg: AlgorithmSection
) -> Tensor:
    """Return the weight that replaces rho = pi / mu, see `Correction`; rho = 1 always stays 1.

    Args:
        log_rho: [tokens] nats.
        sequence_ids: [tokens] int64, the sequence of each token.

    Returns:
        [tokens] >= 0, without gradient. 0 marks a masked token.
    """
    log_rho = log_rho.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    weights = weight_of(cfg).weight(log_rho, sequence_ids, num_sequences, cfg)
    return weights.to(log_rho.dtype)  # A mask is bool.


def kl_weights(new_logprobs: Tensor, micro: MicroBatch, cfg: AlgorithmSection) -> Tensor:
    """Return the weight of each token's KL(pi | reference), [tokens] >= 0, without gradient.

    The estimators assume tokens sampled by pi, but mu sampled them. `correction` is applied to pi /
    mu here as in the surrogate.

    Args:
        new_logprobs: [tokens] nats, current policy.

    Source: the KL estimate of DeepSeek-V3.2, arXiv:2512.02556; there the ratio has a gradient, too.
    """
    log_rho = log_ratio(new_logprobs.detach(), micro.sampler_logprobs)
    return corrected(log_rho, micro.sequence_ids, micro.num_sequences, cfg)


def negative_mask(
    log_rho: Tensor, advantages: Tensor, sequence_ids: Tensor, num_sequences: int, *, delta: float
) -> Tensor:
    """Return [tokens] float: 0 if A < 0 and the episode is too far from the policy, else 1.

    An episode is too far if the mean of log(mu / pi) over its tokens exceeds `delta`. A negative
    advantage would push the policy further away from actions that it no longer takes. Such
    gradients are large and contribute little.

    Args:
        delta: nats per token; 0 masks nothing.

    Source: off-policy sequence masking, DeepSeek-V3.2, arXiv:2512.02556.
    """
    if delta == 0:
        return torch.ones_like(advantages)
    distance = sequence_mean(-log_rho.detach(), sequence_ids, num_sequences)[sequence_ids]
    return 1.0 - ((advantages < 0) & (distance > delta)).to(advantages.dtype)


def interpolated_logprobs(
    new_logprobs: Tensor, sampler_logprobs: Tensor, versions: Tensor, version: int
) -> Tensor:
    """Return log-probabilities of a proximal policy between mu and pi, without a forward pass.

    log pi_prox = log mu + lag / (lag + 1) * (log pi - log mu). Between the sampler and the policy
    under training there are `lag + 1` updates, and the policy of `version` is `lag` of them after
    the sampler. At lag 0 pi_prox is mu, so the clip is relative to the sampler. A larger lag makes
    the clip around the sampler wider.

    AReaL uses (lag - 1) / lag, a proximal policy one update behind the current one, and masks
    tokens whose weight pi_prox / mu is above the cap. Here `correction` truncates the weight.

    Args:
        new_logprobs: [tokens] nats, current policy; detached.
        sampler_logprobs: [tokens] nats of mu.
        versions: [tokens] int64, version of the policy that sampled each token.
        version: version of the current weights.

    Source: A-3PO, the log-linear proximal policy of AReaL.
    """
    lag = (version - versions).clamp(min=0).to(new_logprobs.dtype)
    share = lag / (lag + 1.0)
    return sampler_logprobs + share * (new_logprobs.detach() - sampler_logprobs)
