"""How far the trained policy is from the one that sampled, and weights that correct for it."""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) = 5e8: still finite in float32 after being squared and summed


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


def truncated_weights(prox_logprobs: Tensor, sampler_logprobs: Tensor, *, cap: float) -> Tensor:
    """Return min(pi_prox / mu, cap): truncated importance sampling per token, without gradient.

    It corrects for tokens that an older policy or the engine's arithmetic sampled. Truncation
    trades a little bias for bounded variance.

    Args:
        prox_logprobs: [tokens] nats, policy before the first update of this step.
        sampler_logprobs: [tokens] nats of mu, as reported by the engine.
        cap: > 0. 0 means no correction: all weights are one.

    Returns:
        [tokens] in (0, cap].

    Source: IMPALA, arXiv:1802.01561 (truncation); AReaL, arXiv:2505.24298 (decoupled weight).
    """
    if cap == 0:
        return torch.ones_like(prox_logprobs)
    return log_ratio(prox_logprobs, sampler_logprobs).detach().exp().clamp(max=cap)


def surplus_weights(new_logprobs: Tensor, sampler_logprobs: Tensor, *, cap: float) -> Tensor:
    """Return min(1, cap / r), r = pi / mu: what turns a factor r into min(r, cap), no gradient.

    For the form of the loss whose own ratio already is pi / mu. Multiplying it by
    `truncated_weights` as well would count the ratio twice.

    Args:
        new_logprobs: [tokens] nats, current policy.
        sampler_logprobs: [tokens] nats of mu.
        cap: > 0. 0 means no correction: all weights are one.

    Returns:
        [tokens] in (0, 1].
    """
    if cap == 0:
        return torch.ones_like(new_logprobs)
    ratio = log_ratio(new_logprobs, sampler_logprobs).detach().exp()
    return (cap / ratio).clamp(max=1.0)


def effective_sample_size(weights: Tensor, mask: Tensor) -> Tensor:
    """Return (sum w)^2 / (N sum w^2): the share of tokens that still count.

    Args:
        weights: [tokens] importance ratios, > 0, not truncated.
        mask: [tokens] bool, True on the N tokens to count.

    Returns:
        Scalar float64 in (0, 1]; 1 if all weights are equal.

    Raises:
        ValueError: mask selects nothing.

    Source: Kong, "A note on importance sampling using standardized weights", 1992.
    """
    chosen = weights[mask].double()  # float32 squares of exp(20) would lose the small ones
    if chosen.numel() == 0:
        raise ValueError("the effective sample size of no tokens is undefined")
    return chosen.sum() ** 2 / (chosen.numel() * (chosen**2).sum())


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
    ratio = delta.exp()
    ess = effective_sample_size(ratio, torch.ones_like(ratio, dtype=torch.bool))
    ordered = ratio.sort().values  # torch.quantile refuses more than 16M entries
    last = ordered.numel() - 1
    return {
        "offpolicy/ess_frac": ess.item(),
        "offpolicy/ratio_p01": ordered[round(0.01 * last)].item(),
        "offpolicy/ratio_p50": ordered[round(0.50 * last)].item(),
        "offpolicy/ratio_p99": ordered[round(0.99 * last)].item(),
        "policy/kl_sampler": (ratio - 1 - delta).mean().item(),
    }
