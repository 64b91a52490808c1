"""Synthetic trajectories for simulations and measurements."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from common.wire.messages import EndReason, EpisodeKind, PolicyKind, Trajectory


def synthetic_trajectory(
    token_ids: Sequence[int] | np.ndarray,
    loss_mask: Sequence[int] | np.ndarray,
    *,
    group_id: str,
    member: int,
    version: int = 0,
    **changes: Any,
) -> Trajectory:
    """Return a training episode of one turn that solved its task.

    Args:
        token_ids: [seq].
        loss_mask: [seq], true on sampled tokens.
        version: version of the policy that sampled, and of the group.
        changes: values of other `Trajectory` fields that replace the defaults.
    """
    mask = np.asarray(loss_mask, dtype=bool)
    plain: dict[str, Any] = {
        "episode_id": f"{group_id}/{member}",
        "group_id": group_id,
        "member": member,
        "attempt": 0,
        "kind": EpisodeKind.TRAIN,
        "policy": PolicyKind.MODEL,
        "env": "toy",
        "item_id": "toy-train-0",
        "seed": 0,
        "horizon": 4,
        "horizon_stage": 0,
        "opened_at_version": version,
        "actor": "actor-0",
        "end_reason": EndReason.DONE,
        "error": "",
        "reward": 1.0,
        "is_success": True,
        "num_turns": 1,
        "num_invalid_actions": 0,
        "generate_s": 0.0,
        "env_s": 0.0,
        "wall_s": 0.0,
        "token_ids": np.asarray(token_ids, dtype=np.int32),
        "loss_mask": mask,
        "logprobs": np.zeros(len(mask), dtype=np.float32),
        "versions": np.where(mask, version, -1).astype(np.int32),
        "turn_ids": np.zeros(len(mask), dtype=np.int32),
        "invalid_turns": np.zeros(1, dtype=bool),
        "turn_scores": np.ones(1, dtype=np.float32),
    }
    return Trajectory(**plain | changes)
