"""Which tokens of a batch are trusted by the second moment of their log-ratios."""

import torch
from torch import Tensor


def second_moment_mask(log_ratios: Tensor, *, threshold: float) -> Tensor:
    """Return which tokens train: all but the fewest outliers whose removal makes the rest trusted.

    Tokens are masked in the order of (log r)^2, largest first, until the mean of (log r)^2 over
    those that are left is at most `threshold`. Unlike the mean of log r, the second moment cannot
    be brought down by ratios on the other side.

    Args:
        log_ratios: [tokens] nats, log(pi / mu) of the policy before the batch, all tokens of it.
        threshold: 0.04 in the paper.

    Returns:
        [tokens] bool; of equal outliers all go together. One token at least is left.

    Source: M2PO, arXiv:2510.01161, algorithm 1. AReaL stops below the threshold instead of at it.
    """
    squares = log_ratios.double() ** 2
    if not squares.numel():
        return torch.zeros_like(log_ratios, dtype=torch.bool)
    ordered = squares.sort().values
    counts = torch.arange(1, ordered.numel() + 1, device=ordered.device, dtype=ordered.dtype)
    is_trusted = ordered.cumsum(0) / counts <= threshold
    num_kept = int(is_trusted.sum())  # means of the smallest never fall: a prefix is trusted
    if num_kept == ordered.numel():
        return torch.ones_like(log_ratios, dtype=torch.bool)
    bound = ordered[num_kept]  # the smallest square that must go, and its equals with it
    kept = squares < bound
    return kept if kept.any() else squares <= ordered[0]
