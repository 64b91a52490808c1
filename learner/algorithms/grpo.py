"""Advantages within a group: GRPO, Dr. GRPO and RLOO.

    grpo  R - baseline, optionally divided by the group's deviation. The baseline is the mean of the
          other members (leave_one_out) or of all members (group_mean).
    rloo  R - mean of the other members

With reward_level=turn the return after each turn is compared with those of turns of the same
number. `state_credit` adds a comparison of turns in the same state.

Source: GRPO, arXiv:2402.03300; Dr. GRPO, arXiv:2503.20783; RLOO, arXiv:2402.14740; groups by turn
number, MT-GRPO, arXiv:2505.11821.
"""
# torch's type stubs lack numpy's element types:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from common.config.algorithm import Advantage, AlgorithmSection, Baseline, CreditLevel, StateCredit
from common.config.learner import LearnerSection
from common.wire.messages import Trajectory
from learner.algorithms.ecpo import ECPO
from learner.algorithms.gagpo import GAGPO
from learner.algorithms.gigpo import GIGPO
from learner.algorithms.interface import STD_EPSILON, Estimator, GroupAdvantages
from learner.algorithms.rewards import (
    credit_formula,
    turn_credit,
    turn_penalty_formula,
    turn_rewards,
)

if TYPE_CHECKING:
    from torch import Tensor

TURN_CREDITS = {StateCredit.GIGPO: GIGPO, StateCredit.ECPO: ECPO, StateCredit.GAGPO: GAGPO}


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
    if not rewards.isfinite().all():
        raise ValueError(f"rewards must be finite, got {rewards.tolist()}")
    if not has_signal(rewards):
        return rewards.new_zeros(
            rewards.shape
        )  # The subtraction r - mean(r) would leave rounding noise.
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
    played = [turns for turns in credit if turns.size]
    if len(played) < 2:
        return [np.zeros_like(turns) for turns in credit]
    longest = max(turns.size for turns in played)
    table = np.stack([_padded(turns, longest, holds_last=holds_last) for turns in played])
    compared = np.broadcast_to(table.mean(axis=0), table.shape)  # [member, turn]
    if baseline is Baseline.LEAVE_ONE_OUT:
        compared = (table.sum(axis=0) - table) / (len(played) - 1)
    is_flat = table.max(axis=0) == table.min(axis=0)  # A subtraction would leave rounding noise.
    less = iter(np.where(is_flat, 0.0, table - compared).astype(np.float32))
    return [next(less)[: turns.size] if turns.size else turns for turns in credit]


def _padded(credit: np.ndarray, length: int, *, holds_last: bool) -> np.ndarray:
    """Return the credit [length] float64, continued by its last entry or by zeros."""
    rest = length - credit.size
    last = float(credit[-1]) if holds_last else 0.0
    return np.append(credit.astype(np.float64), np.full(rest, last))


def of_group(
    rewards: Tensor, members: Sequence[Trajectory], cfg: AlgorithmSection
) -> GroupAdvantages:
    """Return the advantages of a group's members and of their turns.

    The advantages of turns are centred. Otherwise a group with only invalid turns would be pushed
    away from all its actions, and a group without invalid turns would gain nothing.
    """
    baseline = baseline_of(cfg)
    scales = is_scaled(cfg)
    by_state = None
    if (by_states := TURN_CREDITS.get(cfg.state_credit)) is not None:
        paid = [turn_rewards(member, cfg) for member in members]
        by_state = by_states.credit(paid, members, cfg, baseline, scales)
        if by_states.is_whole:
            return rewards.new_zeros(rewards.shape), by_state
    is_of_turns = cfg.reward_level is CreditLevel.TURN
    advantages = rewards.new_zeros(rewards.shape)
    if not is_of_turns:
        advantages = group_advantages(rewards, baseline=baseline, normalize_std=scales)
    credit = turn_credit(members, cfg)
    if credit is None:
        return advantages, by_state
    of_turns = less_turn_baseline(credit, baseline, holds_last=is_of_turns)
    if is_of_turns and scales:
        deviation = np.concatenate(credit).std() + STD_EPSILON
        of_turns = [(turns / deviation).astype(np.float32) for turns in of_turns]
    if by_state is not None:
        of_turns = [a + b for a, b in zip(of_turns, by_state, strict=True)]
    return advantages, of_turns


def baseline_of(cfg: AlgorithmSection) -> Baseline:
    """Return the baseline of a member; only GRPO uses the setting `baseline`."""
    if cfg.advantage is Advantage.GRPO:
        return cfg.baseline
    return Baseline.LEAVE_ONE_OUT if cfg.advantage is Advantage.RLOO else Baseline.GROUP_MEAN


def is_scaled(cfg: AlgorithmSection) -> bool:
    """Return whether advantages are divided by a deviation."""
    return cfg.normalize_std and cfg.advantage is Advantage.GRPO


def formula(cfg: AlgorithmSection, learner: LearnerSection) -> str:
    baseline = baseline_of(cfg)
    scales = is_scaled(cfg)
    is_of_turns = cfg.reward_level is CreditLevel.TURN
    peers = "mean_members" if baseline is Baseline.GROUP_MEAN else "mean_others"
    less = f"{peers} same_turn_or_last" if is_of_turns else baseline.value
    text = f"({credit_formula(cfg)} - {less})"
    if scales:
        text += "/std_turns" if is_of_turns else "/std"
    text += turn_penalty_formula(cfg, less=f"{peers} same_turn_or_0")
    by_states = TURN_CREDITS.get(cfg.state_credit)
    if by_states is None:
        return text
    by_state = by_states.formula(cfg, baseline, scales)
    return by_state if by_states.is_whole else f"{text} + {cfg.state_weight:g}*{by_state}"


GRPO = Estimator(
    formula=formula, keys=("baseline", "normalize_std"), of_group=of_group, is_group_relative=True
)
RLOO = Estimator(formula=formula, keys=(), of_group=of_group, is_group_relative=True)
