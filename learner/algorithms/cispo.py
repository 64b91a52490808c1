"""CISPO: a limited ratio without gradient as the weight of log pi.

    detach(min(r, 1 + clip_high)) * A * log pi_theta

No token loses its gradient to a clip.

Source: CISPO, arXiv:2506.13585.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.config.algorithm import AlgorithmSection
from learner.algorithms.interface import LossInputs, Surrogate

if TYPE_CHECKING:
    from torch import Tensor


def loss(inputs: LossInputs, cfg: AlgorithmSection) -> tuple[Tensor, Tensor]:
    ratio = inputs.log_ratios.detach().exp()
    limited = ratio.clamp(max=limit(cfg))
    return -(limited * inputs.advantages * inputs.new_logprobs), limited != ratio


def limit(cfg: AlgorithmSection) -> float:
    return 1 + cfg.clip_high


def formula(cfg: AlgorithmSection) -> str:
    return f"sg(min(r, {limit(cfg):g}))*A*log(pi)"


def open_above(cfg: AlgorithmSection, cap: float) -> str:
    return f"r>{cap:g}" if cap < limit(cfg) else ""


CISPO = Surrogate(
    loss=loss,
    formula=formula,
    keys=("clip_high",),
    is_clipped=True,
    limit=limit,
    open_above=open_above,
)
