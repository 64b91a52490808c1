"""M2PO: the plain ratio, without the tokens of a batch that make its second moment too large.

    unclipped      r A
    second_moment  a mask: the fewest outliers are removed so that the batch mean of (log rho)^2 is
                   at most m2_threshold. Its rho uses the policy before the step.

Source: M2PO, arXiv:2510.01161, algorithm 1. AReaL stops below the threshold instead of at it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.config.algorithm import AlgorithmSection
from learner.algorithms.interface import LossInputs, Surrogate, Weight
from learner.algorithms.tis import no_weight

if TYPE_CHECKING:
    from torch import Tensor


def loss(inputs: LossInputs, cfg: AlgorithmSection) -> Tensor:
    return -(inputs.log_ratios.exp() * inputs.advantages)


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
    """
    squares = log_ratios.double() ** 2
    if not squares.numel():
        return log_ratios.bool()
    ordered = squares.sort().values
    counts = ordered.new_ones(ordered.shape).cumsum(0)
    is_trusted = ordered.cumsum(0) / counts <= threshold
    # Means of the smallest squares never fall, so the trusted tokens form a prefix.
    num_trusted = int(is_trusted.sum())
    if num_trusted == ordered.numel():
        return squares >= 0
    bound = ordered[num_trusted]  # The smallest masked square; all equal squares are masked, too.
    mask = squares < bound
    return mask if mask.any() else squares <= ordered[0]


UNCLIPPED = Surrogate(loss=loss, formula=lambda cfg: "r*A", keys=())
SECOND_MOMENT = Weight(
    weight=no_weight,
    formula=lambda cfg, rho: "",  # The objective prints the mask of the batch.
    keys=("m2_threshold",),
    is_mask=True,
    removes_tokens=True,
    batch_mask=lambda log_rho, cfg: second_moment_mask(log_rho, threshold=cfg.m2_threshold),
)
