"""Credit of a group's turns, compared among turns in the same state. Pure functions.

Entries are the turns of all members of a group, one after another. Turns with the same number in
`states` started in the same state.
"""
# torch's type stubs lack numpy's element types:
# pyright: reportUnknownMemberType=false

from collections.abc import Sequence

import numpy as np
import torch

from common.config.algorithm import AlgorithmSection, Baseline, StateCredit
from common.wire.messages import Trajectory
from learner.batch.returns import discounted_returns, gae
from learner.batch.turn_states import places, turn_actions, turn_states

STD_EPSILON = 1e-6  # As in `advantage.py`.


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

    Source: GiGPO, arXiv:2505.10978, equations 6 and 7.
    """
    returns = returns.astype(np.float64)
    count, mean = _mean_per_state(returns, states)
    centred = returns - mean
    if baseline is Baseline.LEAVE_ONE_OUT:
        centred = centred * count / np.maximum(count - 1, 1)
    if normalize_std:
        _, square = _mean_per_state((returns - mean) ** 2, states)
        centred = centred / (np.sqrt(square) + STD_EPSILON)
    return np.where(_is_flat(returns, states), 0.0, centred)


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

    Source: ECPO, arXiv:2606.05885. The paper defines the shrinkage and the gate in words only. The
    gate as a fraction of variances, as in an analysis of variance, is our interpretation.
    """
    returns = returns.astype(np.float64)
    _, of_state = _mean_per_state(returns, states)
    visits, of_action = _mean_per_state(returns, actions)
    _, between = _mean_per_state((of_action - of_state) ** 2, states)
    _, within = _mean_per_state((returns - of_action) ** 2, states)
    is_flat = _is_flat(returns, states)
    gate = between / np.where(is_flat, 1.0, between + within)
    credit = gate * visits / (visits + prior_visits) * (of_action - of_state)
    return np.where(is_flat, 0.0, credit)


def grouped_gae(
    rewards: Sequence[np.ndarray], states: Sequence[np.ndarray], *, discount: float, trace: float
) -> list[np.ndarray]:
    """Return generalised advantage estimates with a state's mean return as its value.

    V(s) is the mean of the discounted returns of the group's turns in s. After the last turn it is
    zero, as in those returns. delta_t = r_t + discount * V(s_{t+1}) - V(s_t), and A_t = delta_t +
    discount * trace * A_{t+1}. The value of a state that occurs once is its own return. The credit
    therefore moves back to the last turn in a state that other members also visited.

    Args:
        rewards: for each member [num_turns], the reward of each turn.
        states: for each member [num_turns] int64.

    Returns:
        For each member [num_turns] float64; 0.0 throughout if all values in every state agree.

    Source: GAGPO, arXiv:2605.13217.
    """
    wide = [torch.from_numpy(each.astype(np.float64)) for each in rewards]
    returns = [discounted_returns(each, discount=discount).numpy() for each in wide]
    flat = np.concatenate(returns)
    where = np.concatenate(states)
    values = np.where(_is_flat(flat, where), flat, _mean_per_state(flat, where)[1])
    of_members = np.split(values, np.cumsum([len(each) for each in rewards])[:-1])
    return [
        gae(own, torch.from_numpy(value), discount=discount, trace=trace, bootstrap=0.0).numpy()
        if len(own)
        else value
        for own, value in zip(wide, of_members, strict=True)
    ]


def state_advantages(
    members: list[Trajectory],
    rewards: list[np.ndarray],
    algorithm: AlgorithmSection,
    *,
    baseline: Baseline,
    normalize_std: bool,
) -> list[np.ndarray]:
    """Return the credit of each member's turns under `algorithm.state_credit`, [num_turns] float32.

    Args:
        rewards: for each member [num_turns], the reward of each turn.
        baseline: baseline in use, for gigpo.
        normalize_std: whether to normalise: within a state for gigpo, over the group's turns for
            gagpo.
    """
    sizes = [len(each) for each in rewards]
    own_states = [turn_states(each) for each in members]
    states = places([(each,) for each in own_states])
    cuts = np.cumsum(sizes)[:-1]
    discount = algorithm.state_discount
    if algorithm.state_credit is StateCredit.GAGPO:
        parts = grouped_gae(
            rewards, np.split(states, cuts), discount=discount, trace=algorithm.state_lambda
        )
        parts = _normalized(parts) if normalize_std else parts
        return [each.astype(np.float32) for each in parts]
    returns = np.concatenate(
        [discounted_returns(torch.from_numpy(each), discount=discount).numpy() for each in rewards]
    )
    if algorithm.state_credit is StateCredit.ECPO:
        did = [turn_actions(each) for each in members]
        actions = places(list(zip(own_states, did, strict=True)))
        credit = shrunk_advantages(returns, states, actions, prior_visits=algorithm.state_prior)
    else:
        credit = step_advantages(returns, states, baseline=baseline, normalize_std=normalize_std)
    parts = np.split(credit * algorithm.state_weight, cuts)
    return [each.astype(np.float32) for each in parts]


def _normalized(parts: list[np.ndarray]) -> list[np.ndarray]:
    """Return the group's advantages, normalised over all turns to mean 0 and deviation 1."""
    flat = np.concatenate(parts)
    if not flat.size or flat.max() == flat.min():
        return [np.zeros_like(each) for each in parts]
    return [(each - flat.mean()) / (flat.std() + STD_EPSILON) for each in parts]


def _mean_per_state(values: np.ndarray, where: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return [entry] counts of the entries in the same place, and the means of their values."""
    counts = np.bincount(where)
    means = np.bincount(where, weights=values) / np.maximum(counts, 1)
    return counts[where].astype(np.float64), means[where]


def _is_flat(values: np.ndarray, where: np.ndarray) -> np.ndarray:
    """Return [entry] bool: whether all values in the entry's place are equal."""
    num_places = int(where.max()) + 1 if where.size else 0
    low = np.full(num_places, np.inf)
    high = np.full(num_places, -np.inf)
    np.minimum.at(low, where, values)
    np.maximum.at(high, where, values)
    return (low == high)[where]
