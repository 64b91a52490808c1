"""Groups -> samples: each trajectory with its advantage."""

import numpy as np
import torch

from common.config import Aggregation, AlgorithmSection, CreditLevel
from common.messages import Trajectory
from learner.advantage import group_advantages, has_signal, shaped_reward
from learner.batching import Sample
from learner.groups import Group


def _rewards(members: list[Trajectory], algorithm: AlgorithmSection) -> torch.Tensor:
    """Return the shaped rewards [member] of one group."""
    is_on_episode = algorithm.invalid_action_level is CreditLevel.EPISODE
    penalty = algorithm.invalid_action_penalty if is_on_episode else 0.0
    return torch.tensor(
        [
            shaped_reward(
                t.reward * algorithm.turn_discount ** max(t.num_turns - 1, 0),
                t.num_invalid_actions,
                t.num_turns,
                penalty,
            )
            for t in members
        ],
        dtype=torch.float32,
    )


def _turn_offsets(
    members: list[Trajectory], algorithm: AlgorithmSection
) -> list[np.ndarray] | None:
    """Return each member's turn advantages [num_turns]: the penalty, centred over all turns.

    Centred, because otherwise a group in which every turn is invalid would be pushed away from
    everything it did, and one without invalid turns would get nothing for it.
    """
    penalty = algorithm.invalid_action_penalty
    if algorithm.invalid_action_level is CreditLevel.EPISODE or penalty == 0.0:
        return None
    mean = float(np.concatenate([t.invalid_turns for t in members]).mean())
    return [(-penalty * (t.invalid_turns - mean)).astype(np.float32) for t in members]


def group_has_signal(members: list[Trajectory], algorithm: AlgorithmSection) -> bool:
    """Return False if all members are worth the same, so that every advantage is zero."""
    offsets = _turn_offsets(members, algorithm)
    if offsets is not None and any(offset.any() for offset in offsets):
        return True
    return has_signal(_rewards(members, algorithm))


def samples_of(groups: list[Group], algorithm: AlgorithmSection) -> list[Sample]:
    """Return the samples of a batch, group by group, member by member.

    The loss is a sum over tokens divided by their number. With `aggregation=sequence` each
    advantage is multiplied by (mean tokens of the batch / tokens of its episode), which makes that
    the mean over episodes of their token means: the surrogate is homogeneous in the advantage.
    """
    lengths = [int(t.loss_mask.sum()) for group in groups for t in group.members]
    mean_length = sum(lengths) / len(lengths)
    is_by_sequence = algorithm.aggregation is Aggregation.SEQUENCE
    samples: list[Sample] = []
    for group in groups:
        advantages = group_advantages(
            _rewards(group.members, algorithm),
            baseline=algorithm.baseline,
            normalize_std=algorithm.normalize_std,
        )
        offsets = _turn_offsets(group.members, algorithm) or [None] * len(group.members)
        for trajectory, advantage, offset in zip(group.members, advantages, offsets, strict=True):
            num_tokens = int(trajectory.loss_mask.sum())
            weight = mean_length / num_tokens if is_by_sequence else 1.0
            samples.append(
                Sample(
                    trajectory=trajectory,
                    advantage=float(advantage) * weight,
                    turn_advantages=None if offset is None else offset * np.float32(weight),
                )
            )
    return samples
