"""Masks by the ratio: of a token (IcePop), or of a whole sequence (its geometric mean).

    icepop     rho inside [mask_low, mask_high], else 0
    geometric  the sequence is kept if its geometric mean of rho is inside [geometric_low,
               geometric_high]

Source: IcePop, arXiv:2510.18855; the geometric mean as in GSPO's ratio, arXiv:2507.18071.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.config.algorithm import AlgorithmSection
from learner.algorithms.interface import Weight, sequence_mean

if TYPE_CHECKING:
    from torch import Tensor


def token_weight(
    log_rho: Tensor, sequence_ids: Tensor, num_sequences: int, cfg: AlgorithmSection
) -> Tensor:
    rho = log_rho.exp()
    return rho.where((rho >= cfg.mask_low) & (rho <= cfg.mask_high), 0.0)


def sequence_mask(
    log_rho: Tensor, sequence_ids: Tensor, num_sequences: int, cfg: AlgorithmSection
) -> Tensor:
    mean = sequence_mean(log_rho, sequence_ids, num_sequences).exp()
    is_kept = (mean >= cfg.geometric_low) & (mean <= cfg.geometric_high)
    return is_kept[sequence_ids]


def inside(cfg: AlgorithmSection, rho: str) -> str:
    return f"[{cfg.mask_low:g}<={rho}<={cfg.mask_high:g}]"


ICEPOP = Weight(
    weight=token_weight,
    formula=lambda cfg, rho: f"{rho}*{inside(cfg, rho)}",
    keys=("mask_low", "mask_high"),
    removes_tokens=True,
    over_ratio=lambda cfg, limit: inside(cfg, "r"),
)
GEOMETRIC = Weight(
    weight=sequence_mask,
    formula=lambda cfg, rho: (
        f"[{cfg.geometric_low:g}<=geomean_tokens {rho}<={cfg.geometric_high:g}]"
    ),
    keys=("geometric_low", "geometric_high"),
    is_mask=True,
    removes_tokens=True,
)
