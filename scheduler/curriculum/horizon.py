"""Horizons that are a pure function of the version, so that a resumed run has the same ones."""

from dataclasses import dataclass

from common.config.horizon import HorizonKind, HorizonPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class HorizonStamp:
    """Horizon and stage that a group gets when it opens."""

    horizon: int  # Most turns of an episode.
    stage: int  # 0-based index of the last stage reached.


def horizon_at(policy: HorizonPolicy, version: int) -> HorizonStamp:
    """Return the horizon while step `version + 1` is trained.

    fixed: always the last stage.
    stepwise: optimizer steps 1..D use the first stage, D+1..2D the second, and so on. The last
        stage has no end.
    linear: first + (last - first) * version / over_steps, rounded down; after `over_steps` the
        last stage.

    Raises:
        ValueError: a gated horizon is no function of the version.

    Source: ScalingInter-RL, arXiv 2509.08755. There every step is on-policy. Here the version at
    which a group opens decides, so an episode may end after its stage did.
    """
    stages = policy.stages
    last = len(stages) - 1
    match policy.kind:
        case HorizonKind.FIXED:
            return HorizonStamp(horizon=stages[last], stage=last)
        case HorizonKind.STEPWISE:
            stage = min(version // policy.every_steps, last)
            return HorizonStamp(horizon=stages[stage], stage=stage)
        case HorizonKind.LINEAR:
            done = min(version, policy.over_steps)
            horizon = stages[0] + (stages[last] - stages[0]) * done // policy.over_steps
            reached = sum(turns <= horizon for turns in stages)
            return HorizonStamp(horizon=horizon, stage=reached - 1)
        case HorizonKind.GATED:
            raise ValueError(
                "a gated horizon depends on the results of the run, not on the version alone"
            )
