"""The interaction horizon of a step: a pure function of the version, so resume is exact."""

from dataclasses import dataclass

from common.config import HorizonKind, HorizonSection


@dataclass(frozen=True, slots=True, kw_only=True)
class HorizonStamp:
    """What a group opened now is stamped with."""

    horizon: int  # most turns of an episode
    stage: int  # 0-based index into `horizon.stages`


def horizon_at(cfg: HorizonSection, version: int) -> HorizonStamp:
    """Return the horizon while step `version + 1` is trained.

    stepwise: optimizer steps 1..D use the first stage, D+1..2D the second, and so on; the last
    stage holds for ever. fixed: always the last stage.

    Source: ScalingInter-RL, arXiv 2509.08755. There every step is on-policy; here the version at
    the opening of a group decides, so an episode may end after its stage did.
    """
    last = len(cfg.stages) - 1
    stage = last if cfg.kind is HorizonKind.FIXED else min(version // cfg.every_steps, last)
    return HorizonStamp(horizon=cfg.stages[stage], stage=stage)
