"""Rewards of turns and episodes, and their formulas.

R is the score at the end minus the score before the first turn, dR the increase in a turn.
"""
# torch's type stubs lack numpy's element types:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from common.config.algorithm import AlgorithmSection, CreditLevel
from common.wire.messages import Trajectory
from learner.algorithms.interface import tensor_of

if TYPE_CHECKING:
    from torch import Tensor


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


def outcome_credit(trajectory: Trajectory, algorithm: AlgorithmSection) -> float:
    """Return the credit of a whole episode: discounted reward minus the episode's penalty."""
    is_on_episode = algorithm.invalid_action_level is CreditLevel.EPISODE
    return shaped_reward(
        total_turn_reward(trajectory) * algorithm.turn_discount ** max(trajectory.num_turns - 1, 0),
        trajectory.num_invalid_actions,
        trajectory.num_turns,
        algorithm.invalid_action_penalty if is_on_episode else 0.0,
    )


def total_turn_reward(trajectory: Trajectory) -> float:
    """Return the sum of all turn rewards: the last score minus the score before the first turn."""
    return trajectory.reward - trajectory.start_score


def turn_rewards(
    trajectory: Trajectory, algorithm: AlgorithmSection, *, with_end: bool = True
) -> np.ndarray:
    """Return the reward of each turn, [num_turns] float32.

    `turn_scores` are cumulative scores, so a turn's reward is the increase of the score. The first
    turn's reward is the increase over `start_score`. At episode level the last turn receives the
    whole reward. `invalid_action_level` determines the turns that receive penalties.

    Args:
        with_end: False omits the `end_reward`, as for an episode that was cut short.
    """
    num_turns = trajectory.num_turns
    rewards = np.zeros(num_turns, dtype=np.float32)
    if num_turns == 0:
        return rewards
    if algorithm.reward_level is CreditLevel.TURN:
        rewards += np.diff(trajectory.turn_scores, prepend=np.float32(trajectory.start_score))
    if algorithm.invalid_action_level is CreditLevel.TURN:
        rewards -= algorithm.invalid_action_penalty * trajectory.invalid_turns
    if with_end:
        rewards[-1] += end_reward(trajectory, algorithm)
    return rewards


def end_reward(trajectory: Trajectory, algorithm: AlgorithmSection) -> float:
    """Return the reward of the episode's end: the part of the reward at episode level."""
    reward = total_turn_reward(trajectory) if algorithm.reward_level is CreditLevel.EPISODE else 0.0
    if algorithm.invalid_action_level is CreditLevel.EPISODE:
        share = trajectory.num_invalid_actions / max(trajectory.num_turns, 1)
        reward -= algorithm.invalid_action_penalty * share
    return reward


def turn_returns(trajectory: Trajectory, algorithm: AlgorithmSection) -> np.ndarray:
    """Return the discounted return after each turn, [num_turns]."""
    rewards = tensor_of(turn_rewards(trajectory, algorithm))
    return discounted_returns(rewards, discount=algorithm.turn_discount).numpy()


def discounted_returns(rewards: Tensor, *, discount: float, bootstrap: float = 0.0) -> Tensor:
    """Return G_k = r_k + discount * G_{k+1}, where G after the last timestep is `bootstrap`.

    Args:
        rewards: [step].

    Returns:
        [step] of the same dtype.
    """
    returns = rewards.new_empty(rewards.shape)
    following = rewards.new_tensor(bootstrap)
    for step in range(rewards.shape[0] - 1, -1, -1):
        following = rewards[step] + discount * following
        returns[step] = following
    return returns


def credit_formula(cfg: AlgorithmSection) -> str:
    """Return the formula of the credit of an episode, or of the return after a turn."""
    if cfg.reward_level is CreditLevel.TURN:
        paid = paid_formula(cfg)
        return f"sum_later_turns {cfg.turn_discount:g}^k*{f'({paid})' if ' ' in paid else paid}"
    discount = f"*{cfg.turn_discount:g}^(turns-1)" if cfg.turn_discount != 1 else ""
    is_on_turns = cfg.invalid_action_level is CreditLevel.TURN
    penalty = 0.0 if is_on_turns else cfg.invalid_action_penalty
    return f"R{discount}" + (f" - {penalty:g}*invalid_frac" if penalty else "")


def paid_formula(cfg: AlgorithmSection) -> str:
    """Return the formula of a turn's reward; [last] is 1 in the last turn."""
    paid = "dR" if cfg.reward_level is CreditLevel.TURN else "R[last]"
    if cfg.invalid_action_penalty:
        is_on_turns = cfg.invalid_action_level is CreditLevel.TURN
        of = "invalid_turn" if is_on_turns else "invalid_frac[last]"
        paid += f" - {cfg.invalid_action_penalty:g}*{of}"
    return paid


def turn_credit(members: Sequence[Trajectory], cfg: AlgorithmSection) -> list[np.ndarray] | None:
    """Return each member's credit of turns, [num_turns] float32; None: only episodes have credit.

    It is the return after each turn, or minus the penalty of a turn.
    """
    if cfg.reward_level is CreditLevel.TURN:
        return [turn_returns(member, cfg) for member in members]
    if not has_turn_penalty(cfg):
        return None
    penalty = cfg.invalid_action_penalty
    return [(-penalty * member.invalid_turns).astype(np.float32) for member in members]


def has_turn_penalty(cfg: AlgorithmSection) -> bool:
    """Return whether invalid turns have a penalty of their own beside the episode's credit."""
    return (
        cfg.reward_level is CreditLevel.EPISODE
        and cfg.invalid_action_level is CreditLevel.TURN
        and cfg.invalid_action_penalty != 0.0
    )


def turn_penalty_formula(cfg: AlgorithmSection, *, less: str) -> str:
    """Return the formula of a turn's penalty, which adds to the outcome; "" without one."""
    if not has_turn_penalty(cfg):
        return ""
    return f" - {cfg.invalid_action_penalty:g}*(invalid_turn{f' - {less}' if less else ''})"
