"""Masks the tokens of a batch whose log-ratios make the second moment too large."""

import torch
from torch import Tensor


def second_moment_mask(log_ratios: Tensor, *, threshold: float) -> Tensor:
    """Return the tokens to train: the mask removes the fewest outliers that satisfy the bound.

    Tokens are masked in the order of (log r)^2, largest first, until the mean of (log r)^2 over the
    remaining tokens is at most `threshold`. The mean of log r could be lowered by ratios of the
    opposite sign; the second moment cannot.

    Args:
        log_ratios: [tokens] nats, log(pi / mu) of the policy before the batch, for all its tokens.
        threshold: 0.04 in the paper.

    Returns:
        [tokens] bool; equal outliers are masked together. At least one token remains.

    Source: M2PO, arXiv:2510.01161, algorithm 1. AReaL stops below the threshold instead of at it.
    """
    squares = log_ratios.double() ** 2
    if not squares.numel():
        return torch.zeros_like(log_ratios, dtype=torch.bool)
    ordered = squares.sort().values
    counts = torch.arange(1, ordered.numel() + 1, device=ordered.device, dtype=ordered.dtype)
    is_trusted = ordered.cumsum(0) / counts <= threshold
    # Means of the smallest squares never fall, so the trusted tokens form a prefix.
    num_kept = int(is_trusted.sum())
    if num_kept == ordered.numel():
        return torch.ones_like(log_ratios, dtype=torch.bool)
    bound = ordered[num_kept]  # The smallest masked square; all equal squares are masked, too.
    kept = squares < bound
    return kept if kept.any() else squares <= ordered[0]
