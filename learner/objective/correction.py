"""How far the trained policy is from the one that sampled, and weights that correct for it."""

from typing import NamedTuple

import torch
from torch import Tensor

from common.config.learning import AlgorithmSection, Correction, PolicyLoss, Proximal
from learner.batch.batching import MicroBatch
from learner.objective.describe import MASKS_ONLY

MAX_LOG_RATIO = 20.0  # exp(20) = 5e8: still finite in float32 after being squared and summed


def anchor_and_weights(
    new_logprobs: Tensor,
    before: Tensor,
    micro: MicroBatch,
    cfg: AlgorithmSection,
    *,
    proximal: Proximal,
    version: int,
) -> tuple[Tensor, Tensor]:
    """Return what the surrogate's ratio is taken to, and the weight of each token's surrogate.

    Args:
        new_logprobs: [tokens] nats, current policy.
        before: [tokens] nats, policy before the step, or at the sample's first update.
        proximal: never AUTO, see `proximal_in_use`.
        version: of the weights before the step.

    Returns:
        ([tokens] nats, [tokens] >= 0 without gradient). At the sampler GSPO's weights are those of
        its sequences' ratios, and those of `turn` of its turns': the surrogate holds no ratio of a
        token. correction=second_moment looks at the whole batch, so it is not in here.
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
        log_rho = mean_over(log_rho, micro.turn_ids)
    weights = importance_weights(log_rho, *sequences, cfg, is_ratio_included=is_ratio_included)
    return anchor, weights * negative_mask(
        log_ratio(before, mu), micro.advantages, *sequences, delta=cfg.negative_mask_delta
    )


def kl_weights(new_logprobs: Tensor, micro: MicroBatch, cfg: AlgorithmSection) -> Tensor:
    """Return the weight of each token's KL(pi | reference), [tokens] >= 0, without gradient.

    The estimators are of tokens that pi samples; mu sampled these. `correction` says what becomes
    of pi / mu here, as in the surrogate.

    Args:
        new_logprobs: [tokens] nats, current policy.

    Source: the KL estimate of DeepSeek-V3.2, arXiv:2512.02556; there the ratio has a gradient, too.
    """
    log_rho = log_ratio(new_logprobs.detach(), micro.sampler_logprobs)
    return corrected(log_rho, micro.sequence_ids, micro.num_sequences, cfg)


def log_ratio(numerator_logprobs: Tensor, denominator_logprobs: Tensor) -> Tensor:
    """Return log(p / q) per token, kept within +-20 so that its exponential stays finite.

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
    """Return the mean over the tokens of each sequence, [sequence]; 0 where it has none."""
    counts = sequence_sum(torch.ones_like(values), sequence_ids, num_sequences)
    return sequence_sum(values, sequence_ids, num_sequences) / counts.clamp(min=1.0)


def mean_over(values: Tensor, part_ids: Tensor) -> Tensor:
    """Return for each token the mean over the tokens of its part, a turn, say: [tokens].

    Args:
        values: [tokens].
        part_ids: [tokens] int64 >= 0; of those between there may be none.
    """
    num_parts = int(part_ids.max()) + 1 if part_ids.numel() else 0
    return sequence_mean(values, part_ids, num_parts)[part_ids]


def corrected(
    log_rho: Tensor, sequence_ids: Tensor, num_sequences: int, cfg: AlgorithmSection
) -> Tensor:
    """Return what rho = pi / mu is replaced by, see `Correction`; rho = 1 is always left at 1.

    Args:
        log_rho: [tokens] nats.
        sequence_ids: [tokens] int64, the sequence of each token.

    Returns:
        [tokens] >= 0, without gradient. 0 marks a token that is masked.

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
        is_ratio_included: the surrogate's own ratio already is rho (its anchor is the sampler).
            Then the weight is corrected(rho) / rho, so that together they make corrected(rho).
            none and geometric only keep or mask, so there the surrogate's ratio stays as it is.
            CISPO limits its ratio itself: together they make min(corrected(rho), 1 + clip_high).
    """
    weights = corrected(log_rho, sequence_ids, num_sequences, cfg)
    if not is_ratio_included or cfg.correction in MASKS_ONLY:
        return weights
    held = log_rho.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if cfg.policy_loss is PolicyLoss.CISPO:
        most = 1 + cfg.clip_high
        weights, held = weights.clamp(max=most), held.clamp(max=most)
    return weights / held


def negative_mask(
    log_rho: Tensor, advantages: Tensor, sequence_ids: Tensor, num_sequences: int, *, delta: float
) -> Tensor:
    """Return [tokens] float: 0 where A < 0 and the episode has left the policy, else 1.

    An episode has left it where the mean of log(mu / pi) over its tokens exceeds `delta`: pushing
    further away from what the policy would no longer do gives large gradients and teaches little.

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

    log pi_prox = log mu + lag / (lag + 1) * (log pi - log mu): the policy of version `version`
    lies `lag` of `lag + 1` updates behind the one that is being made. At lag 0 it is mu, so the
    clip is to the sampler, and the further it lies back, the wider it is around it.

    AReaL takes (lag - 1) / lag, a proximal policy one update behind the current one, and masks
    tokens whose weight pi_prox / mu is above the cap; here `correction` truncates it.

    Args:
        new_logprobs: [tokens] nats, current policy; its gradient is not followed.
        sampler_logprobs: [tokens] nats of mu.
        versions: [tokens] int64, of the policy that sampled each.
        version: of the current weights.

    Source: A-3PO, the log-linear proximal policy of AReaL.
    """
    lag = (version - versions).clamp(min=0).to(new_logprobs.dtype)
    share = lag / (lag + 1.0)
    return sampler_logprobs + share * (new_logprobs.detach() - sampler_logprobs)


def weight_moments(weights: Tensor) -> Tensor:
    """Return [3] float64: how many weights, their sum, the sum of their squares.

    Those of the parts of a batch add up to those of the whole.
    """
    wide = weights.double()  # float32 squares of exp(20) would lose the small ones
    return torch.stack([wide.new_tensor(wide.numel()), wide.sum(), (wide**2).sum()])


def sample_size_of(moments: Tensor) -> Tensor:
    """Return (sum w)^2 / (N sum w^2), the effective sample size: the share that still counts.

    Args:
        moments: [3] of `weight_moments`; of importance ratios, > 0, not truncated.

    Returns:
        Scalar float64 in (0, 1]; 1 if all weights are equal.

    Source: Kong, "A note on importance sampling using standardized weights", 1992.
    """
    return moments[1] ** 2 / (moments[0] * moments[2])


class Overlap(NamedTuple):
    """How far the policy is from the one that sampled; both 1 on-policy, NaN if it is broken."""

    ess_frac: float  # effective sample size of pi / mu, (0, 1]: falls where ratios differ
    weight_mean: float  # mean of pi / mu: falls where what was sampled is likely no more


def overlap_of(moments: Tensor) -> Overlap:
    """Return the two of `weight_moments`, of importance ratios, > 0, not truncated."""
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
        raise ValueError("the effective sample size of no tokens is undefined")
    ratio = delta.exp()
    ordered = ratio.sort().values  # torch.quantile refuses more than 16M entries
    last = ordered.numel() - 1
    return {
        "offpolicy/ess_frac": sample_size_of(weight_moments(ratio)).item(),
        "offpolicy/ratio_p01": ordered[round(0.01 * last)].item(),
        "offpolicy/ratio_p50": ordered[round(0.50 * last)].item(),
        "offpolicy/ratio_p99": ordered[round(0.99 * last)].item(),
        "policy/kl_sampler": (ratio - 1 - delta).mean().item(),
    }


def lag_statistics(new_logprobs: Tensor, sampler_logprobs: Tensor, lag: Tensor) -> dict[str, float]:
    """Split |log(pi / mu)| into the arithmetic's noise and what versions in between have added.

    Args:
        new_logprobs: [tokens] nats, policy before the step.
        sampler_logprobs: [tokens] nats of mu.
        lag: [tokens] int64 versions between the sampler and the policy.

    Returns:
        noise_abs_logprob: mean over tokens of the current version, where only arithmetic differs.
        lag_abs_logprob: mean over the others, less that noise; absent without both kinds.
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
