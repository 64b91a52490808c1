"""Truncated importance sampling, of a token or of the whole sequence.

    token_tis     min(rho, tis_cap)
    sequence_tis  min(product of rho over the sequence, tis_cap)

Source: truncation, IMPALA, arXiv:1802.01561.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.config.algorithm import AlgorithmSection
from learner.algorithms.interface import MAX_LOG_RATIO, Weight, sequence_sum

if TYPE_CHECKING:
    from torch import Tensor


def token_weight(
    log_rho: Tensor, sequence_ids: Tensor, num_sequences: int, cfg: AlgorithmSection
) -> Tensor:
    return log_rho.exp().clamp(max=cfg.tis_cap)


def sequence_weight(
    log_rho: Tensor, sequence_ids: Tensor, num_sequences: int, cfg: AlgorithmSection
) -> Tensor:
    total = sequence_sum(log_rho, sequence_ids, num_sequences)
    weights = total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=cfg.tis_cap)
    return weights[sequence_ids]


def no_weight(
    log_rho: Tensor, sequence_ids: Tensor, num_sequences: int, cfg: AlgorithmSection
) -> Tensor:
    return log_rho.new_ones(log_rho.shape).bool()


def token_over_ratio(cfg: AlgorithmSection, limit: float | None) -> str:
    if limit is None:
        return f"min(1, {cfg.tis_cap:g}/r)"
    # A tighter limit of the surrogate leaves nothing to the cap.
    return "" if cfg.tis_cap >= limit else f"min(r, {cfg.tis_cap:g})/min(r, {limit:g})"


def sequence_over_ratio(cfg: AlgorithmSection, limit: float | None) -> str:
    cap = cfg.tis_cap if limit is None else min(cfg.tis_cap, limit)
    return f"min(prod_tokens r, {cap:g})/" + ("r" if limit is None else f"min(r, {limit:g})")


TOKEN_TIS = Weight(
    weight=token_weight,
    formula=lambda cfg, rho: f"min({rho}, {cfg.tis_cap:g})",
    keys=("tis_cap",),
    over_ratio=token_over_ratio,
)
SEQUENCE_TIS = Weight(
    weight=sequence_weight,
    formula=lambda cfg, rho: f"min(prod_tokens {rho}, {cfg.tis_cap:g})",
    keys=("tis_cap",),
    over_ratio=sequence_over_ratio,
)
NONE = Weight(weight=no_weight, formula=lambda cfg, rho: "", keys=(), is_mask=True)
