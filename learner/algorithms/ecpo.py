"""ECPO: the mean return of a turn's action in its state, shrunk after few visits.

It adds to the episode's advantage.

Source: ECPO, arXiv:2606.05885. The paper defines the shrinkage and the gate in words only. The gate
as a fraction of variances, as in an analysis of variance, is our interpretation.
"""

from collections.abc import Sequence

import numpy as np

from common.config.algorithm import AlgorithmSection, Baseline
from common.wire.messages import Trajectory
from learner.algorithms.interface import TurnCredit
from learner.algorithms.states import (
    by_member,
    group_actions,
    group_states,
    is_flat,
    mean_per_state,
    returns_formula,
    returns_of,
)


def shrunk_advantages(
    returns: np.ndarray, states: np.ndarray, actions: np.ndarray, *, prior_visits: float
) -> np.ndarray:
    """Return the advantage of each turn's action in its state, shrunk if there is little evidence.

    A(s, a) = g(s) * n(s, a) / (n(s, a) + prior_visits) * (mean return of a in s - mean return in
    s). The second factor shrinks the advantage of an action that occurs rarely. The gate g is the
    fraction of the variance of returns in s that lies between actions. A state therefore counts
    little if the same action has very different returns in it.

    Args:
        returns: [entry] discounted return from each turn on.
        states: [entry] int64.
        actions: [entry] int64, number of the pair of state and action.
        prior_visits: weight, in visits, of the prior estimate "no better than the state"; 0: none.

    Returns:
        [entry] float64; 0.0 in a state in which all actions or all returns are equal.
    """
    returns = returns.astype(np.float64)
    _, of_state = mean_per_state(returns, states)
    visits, of_action = mean_per_state(returns, actions)
    _, between = mean_per_state((of_action - of_state) ** 2, states)
    _, within = mean_per_state((returns - of_action) ** 2, states)
    has_no_signal = is_flat(returns, states)
    gate = between / np.where(has_no_signal, 1.0, between + within)
    credit = gate * visits / (visits + prior_visits) * (of_action - of_state)
    return np.where(has_no_signal, 0.0, credit)


def credit(
    rewards: list[np.ndarray],
    members: Sequence[Trajectory],
    cfg: AlgorithmSection,
    baseline: Baseline,
    normalize_std: bool,
) -> list[np.ndarray]:
    advantages = shrunk_advantages(
        returns_of(rewards, cfg),
        group_states(members),
        group_actions(members),
        prior_visits=cfg.state_prior,
    )
    return by_member(advantages * cfg.state_weight, rewards)


def formula(cfg: AlgorithmSection, baseline: Baseline, normalize_std: bool) -> str:
    return (
        f"gate*n/(n+{cfg.state_prior:g})*(mean_same_state_and_action G - mean_same_state G; "
        f"n visits, gate=var_between_actions/var, {returns_formula(cfg)})"
    )


ECPO = TurnCredit(
    credit=credit, formula=formula, keys=("state_weight", "state_discount", "state_prior")
)
