"""The learner's side of the wire, small: a trajectory of one token, and when a group has signal."""

import numpy as np

from common.wire.messages import EndReason, Lease, Trajectory


def trajectory_of(
    lease: Lease, *, version: int, reward: float, end_reason: EndReason, actor: str = "actor-0"
) -> Trajectory:
    """Return an episode of one sampled token."""
    return Trajectory(
        **lease.identity(),
        actor=actor,
        end_reason=end_reason,
        error="",
        reward=reward,
        is_success=reward > 0,
        num_turns=1,
        num_invalid_actions=0,
        generate_s=0.0,
        env_s=0.0,
        wall_s=1.0,
        token_ids=np.array([1, 2], dtype=np.int32),
        loss_mask=np.array([False, True]),
        logprobs=np.zeros(2, dtype=np.float32),
        versions=np.array([-1, version], dtype=np.int32),
        turn_ids=np.zeros(2, dtype=np.int32),
        invalid_turns=np.zeros(1, dtype=bool),
        turn_scores=np.zeros(1, dtype=np.float32),
    )


def has_signal(members: list[Trajectory]) -> bool:
    """Return True if not all are worth the same."""
    return len({member.reward for member in members}) > 1
