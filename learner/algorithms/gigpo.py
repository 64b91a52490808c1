"""GiGPO: the return of a turn minus the mean return of the group's turns in the same state.

It adds to the episode's advantage.

Source: GiGPO, arXiv:2505.10978, equations 6 and 7.
"""

from collections.abc import Sequence

import numpy as np

from common.config.algorithm import AlgorithmSection, Baseline
from common.wire.messages import Trajectory
from learner.algorithms.interface import STD_EPSILON, TurnCredit
from learner.algorithms.states import (
    by_member,
    group_states,
    is_flat,
    mean_per_state,
    returns_formula,
    returns_of,
)


def step_advantages(
    returns: np.ndarray, states: np.ndarray, *, baseline: Baseline, normalize_std: bool
) -> np.ndarray:
    """Return each turn's return minus the mean return of the turns in its state.

    Args:
        returns: [entry] discounted return from each turn on.
        states: [entry] int64, number of the state in which the turn started.
        baseline: GROUP_MEAN is the mean of all turns in the state, as in the paper. LEAVE_ONE_OUT
            is the mean of the other turns; the result is n / (n - 1) times that of GROUP_MEAN.
        normalize_std: divide by the population standard deviation within the state.

    Returns:
        [entry] float64, sum zero in each state. Exactly 0.0 in a state that occurs once, or in
        which all returns are equal. (The authors' program keeps the return of a state that occurs
        once; in the paper its group of one equals its own mean.)
    """
    returns = returns.astype(np.float64)
    count, mean = mean_per_state(returns, states)
    centred = returns - mean
    if baseline is Baseline.LEAVE_ONE_OUT:
        centred = centred * count / np.maximum(count - 1, 1)
    if normalize_std:
        _, square = mean_per_state((returns - mean) ** 2, states)
        centred = centred / (np.sqrt(square) + STD_EPSILON)
    return np.where(is_flat(returns, states), 0.0, centred)


def credit(
    rewards: list[np.ndarray],
    members: Sequence[Trajectory],
    cfg: AlgorithmSection,
    baseline: Baseline,
    normalize_std: bool,
) -> list[np.ndarray]:
    advantages = step_advantages(
        returns_of(rewards, cfg),
        group_states(members),
        baseline=baseline,
        normalize_std=normalize_std,
    )
    return by_member(advantages * cfg.state_weight, rewards)


def formula(cfg: AlgorithmSection, baseline: Baseline, normalize_std: bool) -> str:
    peers = "others_in" if baseline is Baseline.LEAVE_ONE_OUT else "all_in"
    text = f"(G - mean_{peers}_same_state G; {returns_formula(cfg)})"
    return f"{text}/std_same_state" if normalize_std else text


GIGPO = TurnCredit(credit=credit, formula=formula, keys=("state_weight", "state_discount"))
