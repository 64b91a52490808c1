"""Measures how far the trained policy is from the sampler, and computes correction weights."""

from typing import NamedTuple

import torch
from torch import Tensor

from common.config.algorithm import AlgorithmSection, Correction, PolicyLoss, Proximal
from learner.batch.batching import MicroBatch
from learner.objective.describe import MASKS_ONLY

MAX_LOG_RATIO = 20.0  # exp(20) = 5e8 stays finite in float32 after squaring and summation.


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
        sequences' or the turns' ratios. correction=second_moment depends on the whole batch and is
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
    if is_ratio_included and cfg.policy_loss is PolicyLoss.GSPO:
        log_rho = sequence_mean(log_rho, *sequences)[micro.sequence_ids]
    if is_ratio_included and cfg.policy_loss is PolicyLoss.TURN:
        log_rho = mean_over(log_rho, micro.turn_ids, micro.num_turns)
    weights = importance_weights(log_rho, *sequences, cfg, is_ratio_included=is_ratio_included)
    return anchor, weights * negative_mask(
        log_ratio(before, mu), micro.advantages, *sequences, delta=cfg.negative_mask_delta
    )


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


def log_ratio(numerator_logprobs: Tensor, denominator_logprobs: Tensor) -> Tensor:
    """Return log(p / q) per token, clamped to +-20 so that its exponential stays finite.

    Args:
        numerator_logprobs: [tokens] nats of p.
        denominator_logprobs: [tokens] nats of q.

    Raises:
        ValueError: the shapes differ.
    """
    if numerator_logprobs.shape != denominator_logprobs.shape:
        shapes = (tuple(numerator_logprobs.shape), tuple(denominator_logprobs.shape))
        raise ValueError(f"logprobs must share one shape, got {shapes[0]} and {shapes[1]}")
    return (numerator_logprobs - denominator_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_sum(values: Tensor, sequence_ids: Tensor, num_sequences: int) -> Tensor:
    """Return the sum over the tokens of each sequence, [sequence].

    Args:
        values: [tokens].
        sequence_ids: [tokens] int64 in [0, num_sequences).
    """
    sums = values.new_zeros(num_sequences)
    return sums.index_add(0, sequence_ids, values)


def sequence_mean(values: Tensor, sequence_ids: Tensor, num_sequences: int) -> Tensor:
    """Return the mean over the tokens of each sequence, [sequence]; 0 for an empty sequence."""
    counts = sequence_sum(torch.ones_like(values), sequence_ids, num_sequences)
    return sequence_sum(values, sequence_ids, num_sequences) / counts.clamp(min=1.0)


def mean_over(values: Tensor, part_ids: Tensor, num_parts: int | None = None) -> Tensor:
    """Return for each token the mean over the tokens of its part (for example a turn), [tokens].

    Args:
        values: [tokens].
        part_ids: [tokens] int64 >= 0; some numbers may be missing.
        num_parts: above all ids. None: the largest id is read, which waits for a GPU.
    """
    if num_parts is None:
        num_parts = int(part_ids.max()) + 1 if part_ids.numel() else 0
    return sequence_mean(values, part_ids, num_parts)[part_ids]


def corrected(
    log_rho: Tensor, sequence_ids: Tensor, num_sequences: int, cfg: AlgorithmSection
) -> Tensor:
    """Return the weight that replaces rho = pi / mu, see `Correction`; rho = 1 always stays 1.

    Args:
        log_rho: [tokens] nats.
        sequence_ids: [tokens] int64, the sequence of each token.

    Returns:
        [tokens] >= 0, without gradient. 0 marks a masked token.

    Source: truncation, IMPALA, arXiv:1802.01561; IcePop, arXiv:2510.18855; sequence-level masks by
    a geometric mean as in GSPO's ratio, arXiv:2507.18071.
    """
    log_rho = log_rho.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    rho = log_rho.exp()
    if cfg.correction is Correction.TOKEN_TIS:
        return rho.clamp(max=cfg.tis_cap)
    if cfg.correction is Correction.ICEPOP:
        return torch.where((rho >= cfg.mask_low) & (rho <= cfg.mask_high), rho, 0.0)
    if cfg.correction is Correction.SEQUENCE_TIS:
        total = sequence_sum(log_rho, sequence_ids, num_sequences)
        weights = total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=cfg.tis_cap)
        return weights[sequence_ids]
    if cfg.correction is Correction.GEOMETRIC:
        mean = sequence_mean(log_rho, sequence_ids, num_sequences).exp()
        is_kept = (mean >= cfg.geometric_low) & (mean <= cfg.geometric_high)
        return is_kept.to(rho.dtype)[sequence_ids]
    return torch.ones_like(rho)


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
            weight is then corrected(rho) / rho, so that the product is corrected(rho). The
            corrections in `MASKS_ONLY` only keep or mask, so the surrogate's ratio does not change.
            CISPO limits its ratio itself: the product is min(corrected(rho), 1 + clip_high).
    """
    weights = corrected(log_rho, sequence_ids, num_sequences, cfg)
    if not is_ratio_included or cfg.correction in MASKS_ONLY:
        return weights
    held = log_rho.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if cfg.policy_loss is PolicyLoss.CISPO:
        most = 1 + cfg.clip_high
        weights = weights.clamp(max=most)
        held = held.clamp(max=most)
    return weights / held


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


def weight_moments(weights: Tensor) -> Tensor:
    """Return [3] float64: the number of weights, their sum, the sum of their squares.

    The moments of a batch are the sums of the moments of its parts.
    """
    wide = weights.double()  # float32 squares of exp(20) would lose the small weights.
    return torch.stack([wide.new_tensor(wide.numel()), wide.sum(), (wide**2).sum()])


def sample_size_of(moments: Tensor) -> Tensor:
    """Return the effective sample size as a fraction: (sum w)^2 / (N sum w^2).

    Args:
        moments: [3] of `weight_moments`, from importance ratios, > 0, not truncated.

    Returns:
        Scalar float64 in (0, 1]; 1 if all weights are equal.

    Source: Kong, "A note on importance sampling using standardized weights", 1992.
    """
    return moments[1] ** 2 / (moments[0] * moments[2])


class Overlap(NamedTuple):
    """Overlap of policy and sampler; both values are 1 on-policy, NaN if the policy is broken."""

    ess_frac: float  # Effective sample size of pi / mu, (0, 1]; it falls if the ratios differ.
    weight_mean: float  # Mean of pi / mu; it falls if sampled tokens become unlikely.


def overlap_of(moments: Tensor) -> Overlap:
    """Return the overlap from `weight_moments` of importance ratios, > 0, not truncated."""
    return Overlap(sample_size_of(moments).item(), (moments[1] / moments[0]).item())


def ratio_statistics(new_logprobs: Tensor, sampler_logprobs: Tensor) -> dict[str, float]:
    """Return quantiles and effective sample size of r = pi / mu, and k3's estimate of KL(mu | pi).

    Args:
        new_logprobs: [tokens] nats, policy before the step.
        sampler_logprobs: [tokens] nats of mu.

    Raises:
        ValueError: there are no tokens, or the shapes differ.

    Source of k3 = r - 1 - log r (>= 0): Schulman, "Approximating KL divergence", 2020.
    """
    delta = log_ratio(new_logprobs, sampler_logprobs)  # [tokens]
    if delta.numel() == 0:
        raise ValueError("the effective sample size needs at least one token")
    ratio = delta.exp()
    ordered = ratio.sort().values  # Sorted, since torch.quantile refuses more than 16M entries.
    last = ordered.numel() - 1
    return {
        "offpolicy/ess_frac": sample_size_of(weight_moments(ratio)).item(),
        "offpolicy/ratio_p01": ordered[round(0.01 * last)].item(),
        "offpolicy/ratio_p50": ordered[round(0.50 * last)].item(),
        "offpolicy/ratio_p99": ordered[round(0.99 * last)].item(),
        "policy/kl_sampler": (ratio - 1 - delta).mean().item(),
    }


def lag_statistics(new_logprobs: Tensor, sampler_logprobs: Tensor, lag: Tensor) -> dict[str, float]:
    """Split |log(pi / mu)| into arithmetic noise and the effect of version lag.

    Args:
        new_logprobs: [tokens] nats, policy before the step.
        sampler_logprobs: [tokens] nats of mu.
        lag: [tokens] int64 versions between the sampler and the policy.

    Returns:
        noise_abs_logprob: mean over tokens of the current version, which differ by arithmetic only.
        lag_abs_logprob: mean over the other tokens, minus that noise; absent without both kinds.
    """
    is_same = lag == 0
    metrics = {"offpolicy/num_same_version_tokens": float(is_same.sum())}
    distance = (new_logprobs - sampler_logprobs).abs()
    if is_same.any():
        metrics["offpolicy/noise_abs_logprob"] = distance[is_same].mean().item()
        if (~is_same).any():
            gap = distance[~is_same].mean() - distance[is_same].mean()
            metrics["offpolicy/lag_abs_logprob"] = gap.item()
    return metrics
