"""An episode outside of a training run: for an evaluation, a demonstration or AgentEvol."""

from dataclasses import dataclass

from common.wire.messages import PolicyKind


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedEpisode:
    """One episode to play."""

    episode_id: str
    env: str
    item_id: str
    seed: int  # Seed of the environment.
    horizon: int  # Maximum number of turns.
    policy: PolicyKind = PolicyKind.MODEL
