"""REINFORCE++: advantages that are whitened over all tokens of the batch.

    reinforce_pp           whiten(R)
    reinforce_pp_baseline  whiten(R - mean of the group)

Source: REINFORCE++, arXiv:2501.03262 (advantages normalised over the global batch).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from common.config.algorithm import AlgorithmSection, CreditLevel
from common.config.learner import LearnerSection
from common.wire.messages import Trajectory
from learner.algorithms.grpo import RLOO
from learner.algorithms.interface import STD_EPSILON, Estimator, GroupAdvantages
from learner.algorithms.rewards import credit_formula, turn_credit, turn_penalty_formula

if TYPE_CHECKING:
    from torch import Tensor


def whiten(values: Tensor, weights: Tensor) -> Tensor:
    """Return values minus their weighted mean, divided by their weighted standard deviation.

    Args:
        values: [entry].
        weights: [entry] >= 0, count of each entry, for example the tokens of an episode.

    Returns:
        [entry] float32; zeros if all entries are equal.
    """
    values = values.double()
    weights = weights.double()
    mean = (values * weights).sum() / weights.sum()
    centred = values - mean
    variance = (centred**2 * weights).sum() / weights.sum()
    if values.max() == values.min():
        return values.new_zeros(values.shape).float()
    return (centred / (variance.sqrt() + STD_EPSILON)).float()


def of_group(
    rewards: Tensor, members: Sequence[Trajectory], cfg: AlgorithmSection
) -> GroupAdvantages:
    """Return the rewards of episodes and turns as they are: the batch centres them."""
    is_of_turns = cfg.reward_level is CreditLevel.TURN
    return rewards.new_zeros(rewards.shape) if is_of_turns else rewards, turn_credit(members, cfg)


def formula(cfg: AlgorithmSection, learner: LearnerSection) -> str:
    return f"({credit_formula(cfg)})" + turn_penalty_formula(cfg, less="")


REINFORCE_PP = Estimator(formula=formula, keys=(), of_group=of_group, is_whitened=True)
REINFORCE_PP_BASELINE = replace(RLOO, is_whitened=True)  # `grpo.baseline_of` is the group's mean.
