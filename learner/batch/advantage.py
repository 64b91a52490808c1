"""Reward -> advantage. Pure functions on tensors and arrays."""
# torch's type stubs lack numpy's element types:
# pyright: reportUnknownMemberType=false

import numpy as np
import torch
from torch import Tensor

from common.config.algorithm import Baseline

STD_EPSILON = 1e-6  # Keeps the division finite; far below any real deviation of rewards.


def shaped_reward(reward: float, num_invalid: int, num_turns: int, penalty: float) -> float:
    """Return the reward minus a penalty for actions that the environment could not execute.

    Args:
        reward: reward of the episode, [0, 1].
        num_invalid: turns whose action was invalid.
        num_turns: turns of the episode; 0 if it ended before the first action.
        penalty: penalty of an episode with only invalid actions.

    Returns:
        reward - penalty * num_invalid / num_turns.

    Raises:
        ValueError: num_invalid is not within [0, num_turns].
    """
    if not 0 <= num_invalid <= num_turns:
        raise ValueError(f"num_invalid={num_invalid} is not within [0, num_turns={num_turns}]")
    return reward - penalty * num_invalid / max(num_turns, 1)


def has_signal(rewards: Tensor) -> bool:
    """Return True if the members of one group differ, so that the group has a training signal.

    Args:
        rewards: [member].
    """
    return bool(rewards.max() != rewards.min())


def group_advantages(rewards: Tensor, *, baseline: Baseline, normalize_std: bool) -> Tensor:
    """Return each member's reward minus the baseline of its group.

    Args:
        rewards: [member], of the remaining members of one group.
        baseline: LEAVE_ONE_OUT is the mean of the *other* members, which makes the baseline
            independent of the member's own actions (RLOO). GROUP_MEAN is the mean of all members
            (GRPO); its advantages are those of LEAVE_ONE_OUT times (size - 1) / size.
        normalize_std: divide by the group's population standard deviation, as GRPO does. This gives
            more weight to groups that are almost solved or almost hopeless, which Dr. GRPO calls a
            bias. False with GROUP_MEAN is Dr. GRPO.

    Returns:
        [member] float32, sum zero. Exactly 0.0 everywhere if all rewards are equal, and for a
        single member, which has no peers.

    Raises:
        ValueError: rewards is not one axis of finite numbers.

    Source: GRPO, arXiv:2402.03300; Dr. GRPO, arXiv:2503.20783; RLOO, arXiv:2402.14740.
    """
    if rewards.ndim != 1 or rewards.shape[0] < 1:
        raise ValueError(f"rewards must have shape [member >= 1], got {tuple(rewards.shape)}")
    rewards = rewards.float()
    if not torch.isfinite(rewards).all():
        raise ValueError(f"rewards must be finite, got {rewards.tolist()}")
    if not has_signal(rewards):
        return torch.zeros_like(rewards)  # The subtraction r - mean(r) would leave rounding noise.
    centred = rewards - rewards.mean()  # [member]
    if baseline is Baseline.LEAVE_ONE_OUT:
        size = rewards.shape[0]
        advantages = centred * size / (size - 1)  # Equal to r - (sum - r) / (size - 1).
    else:
        advantages = centred
    if normalize_std:
        advantages = advantages / (rewards.std(correction=0) + STD_EPSILON)
    return advantages


def less_turn_baseline(
    credit: list[np.ndarray], baseline: Baseline, *, holds_last: bool
) -> list[np.ndarray]:
    """Return each member's credit minus the mean credit of the group's turns of the same number.

    Turn k of a member is compared with turn k of each other member (LEAVE_ONE_OUT) or of all
    members (GROUP_MEAN). Members with the same credit in every turn therefore get zeros. Members
    may have different numbers of turns. A baseline of only the active members would leave no
    baseline for the last turns of the longest member. The return of an ended member therefore stays
    at its last value: members with return 1 in every turn get zeros, whatever their lengths.

    Args:
        credit: for each member [num_turns] float32.
        holds_last: True: an ended member counts with the credit of its last turn. False: it counts
            with 0, for penalties, because it takes no more invalid actions.

    Returns:
        For each member [num_turns] float32. Zeros if no other member has a turn.

    Source: groups by turn number, MT-GRPO, arXiv:2505.11821, where all members have equally many
    turns. The value for an ended member is our choice.
    """
    played = [each for each in credit if each.size]
    if len(played) < 2:
        return [np.zeros_like(each) for each in credit]
    longest = max(each.size for each in played)
    table = np.stack([_padded(each, longest, holds_last=holds_last) for each in played])
    compared = np.broadcast_to(table.mean(axis=0), table.shape)  # [member, turn]
    if baseline is Baseline.LEAVE_ONE_OUT:
        compared = (table.sum(axis=0) - table) / (len(played) - 1)
    is_flat = table.max(axis=0) == table.min(axis=0)  # A subtraction would leave rounding noise.
    less = iter(np.where(is_flat, 0.0, table - compared).astype(np.float32))
    return [next(less)[: each.size] if each.size else each for each in credit]


def _padded(credit: np.ndarray, length: int, *, holds_last: bool) -> np.ndarray:
    """Return the credit [length] float64, continued by its last entry or by zeros."""
    rest = length - credit.size
    last = float(credit[-1]) if holds_last else 0.0
    return np.append(credit.astype(np.float64), np.full(rest, last))


def whiten(values: Tensor, weights: Tensor) -> Tensor:
    """Return values minus their weighted mean, divided by their weighted standard deviation.

    Args:
        values: [entry].
        weights: [entry] >= 0, count of each entry, for example the tokens of an episode.

    Returns:
        [entry] float32; zeros if all entries are equal.

    Source: REINFORCE++, arXiv:2501.03262 (advantages normalised over the global batch).
    """
    values = values.double()
    weights = weights.double()
    mean = (values * weights).sum() / weights.sum()
    centred = values - mean
    variance = (centred**2 * weights).sum() / weights.sum()
    if values.max() == values.min():
        return torch.zeros_like(values, dtype=torch.float32)
    return (centred / (variance.sqrt() + STD_EPSILON)).float()


def scale_per_kind(values: Tensor, weights: Tensor, kinds: list[str]) -> Tensor:
    """Return values divided by the weighted root mean square of their own kind.

    In a batch of several environments, each environment then has advantages of the same scale,
    whatever the deviation of its rewards. The mean does not change: group baselines have already
    centred it.

    Args:
        values: [entry].
        weights: [entry] >= 0.
        kinds: [entry], the environment of each.

    Source: task advantage normalisation, AgentRL, arXiv:2510.04206.
    """
    scaled = values.float().clone()
    for kind in sorted(set(kinds)):
        own = torch.tensor([each == kind for each in kinds])
        w = weights[own].double()
        spread = ((values[own].double() ** 2 * w).sum() / w.sum()).sqrt()
        if spread > 0:
            scaled[own] = (values[own].double() / (spread + STD_EPSILON)).float()
    return scaled
