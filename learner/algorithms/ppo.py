"""PPO's surrogate: the ratio of each token, clipped.

    min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), at least dual_clip * A if A < 0

Source: PPO, arXiv:1707.06347; an upper bound of its own (clip-higher), DAPO, arXiv:2503.14476; dual
clip, arXiv:1912.09729.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.config.algorithm import AlgorithmSection
from learner.algorithms.interface import LossInputs, Surrogate

if TYPE_CHECKING:
    from torch import Tensor

KEYS = ("clip_low", "clip_high", "dual_clip")


def loss(inputs: LossInputs, cfg: AlgorithmSection) -> tuple[Tensor, Tensor]:
    return clipped(inputs.log_ratios, inputs.advantages, cfg)


def clipped(log_r: Tensor, advantages: Tensor, cfg: AlgorithmSection) -> tuple[Tensor, Tensor]:
    """Return minus the clipped surrogate of a ratio, and whether a bound determines it."""
    ratio = log_r.exp()
    plain = ratio * advantages
    surrogate = plain.minimum(ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high) * advantages)
    if cfg.dual_clip > 0:
        floored = surrogate.maximum(cfg.dual_clip * advantages)
        surrogate = floored.where(advantages < 0, surrogate)
    return -surrogate, surrogate != plain


def formula(cfg: AlgorithmSection) -> str:
    surrogate = f"min(r*A, clip(r, {1 - cfg.clip_low:g}, {1 + cfg.clip_high:g})*A)"
    if cfg.dual_clip > 0:
        return f"[{surrogate}, at least {cfg.dual_clip:g}*A if A<0]"
    return surrogate


def open_above(cfg: AlgorithmSection, cap: float) -> str:
    """Return where a ratio above `cap` has a gradient.

    The clip ends the gradient above 1 + clip_high for A > 0, and dual_clip for A < 0.
    """
    most = 1 + cfg.clip_high
    parts = [f"A>0 and {cap:g}<r<{most:g}"] if cap < most else []
    if cfg.dual_clip == 0:
        parts.append(f"A<0 and r>{cap:g}")
    elif cap < cfg.dual_clip:
        parts.append(f"A<0 and {cap:g}<r<{cfg.dual_clip:g}")
    return ", or ".join(parts)


PPO = Surrogate(loss=loss, formula=formula, keys=KEYS, is_clipped=True, open_above=open_above)
