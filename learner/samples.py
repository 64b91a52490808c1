"""Groups -> samples: each trajectory with its advantage."""

import torch

from common.config import AlgorithmSection
from common.messages import Trajectory
from learner.advantage import group_advantages, has_signal, shaped_reward
from learner.batching import Sample
from learner.groups import Group


def _rewards(members: list[Trajectory], algorithm: AlgorithmSection) -> torch.Tensor:
    """Return the shaped rewards [member] of one group."""
    return torch.tensor(
        [
            shaped_reward(
                t.reward, t.num_invalid_actions, t.num_turns, algorithm.invalid_action_penalty
            )
            for t in members
        ],
        dtype=torch.float32,
    )


def group_has_signal(members: list[Trajectory], algorithm: AlgorithmSection) -> bool:
    """Return False if all members are worth the same, so that every advantage is zero."""
    return has_signal(_rewards(members, algorithm))


def samples_of(groups: list[Group], algorithm: AlgorithmSection) -> list[Sample]:
    """Return the samples of a batch, group by group, member by member."""
    samples: list[Sample] = []
    for group in groups:
        advantages = group_advantages(
            _rewards(group.members, algorithm),
            baseline=algorithm.baseline,
            normalize_std=algorithm.normalize_std,
        )
        samples += [
            Sample(trajectory=trajectory, advantage=float(advantage))
            for trajectory, advantage in zip(group.members, advantages, strict=True)
        ]
    return samples
