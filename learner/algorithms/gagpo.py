"""GAGPO: generalised advantage estimation over turns, with the mean return of a state as its value.

It replaces the episode's advantage.

Source: GAGPO, arXiv:2605.13217.
"""
# torch's type stubs lack numpy's element types:
# pyright: reportUnknownMemberType=false

from collections.abc import Sequence

import numpy as np

from common.config.algorithm import AlgorithmSection, Baseline
from common.wire.messages import Trajectory
from learner.algorithms.critic import gae
from learner.algorithms.interface import STD_EPSILON, TurnCredit, tensor_of
from learner.algorithms.rewards import discounted_returns
from learner.algorithms.states import (
    by_member,
    group_states,
    is_flat,
    mean_per_state,
    returns_formula,
)


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
    """
    wide = [tensor_of(turns.astype(np.float64)) for turns in rewards]
    returns = [discounted_returns(turns, discount=discount).numpy() for turns in wide]
    flat = np.concatenate(returns)
    where = np.concatenate(states)
    values = np.where(is_flat(flat, where), flat, mean_per_state(flat, where)[1])
    of_members = np.split(values, np.cumsum([len(turns) for turns in rewards])[:-1])
    return [
        gae(paid, tensor_of(value), discount=discount, trace=trace, bootstrap=0.0).numpy()
        if len(paid)
        else value
        for paid, value in zip(wide, of_members, strict=True)
    ]


def credit(
    rewards: list[np.ndarray],
    members: Sequence[Trajectory],
    cfg: AlgorithmSection,
    baseline: Baseline,
    normalize_std: bool,
) -> list[np.ndarray]:
    """Return the credit of each member's turns; normalised over all turns of the group."""
    cuts = np.cumsum([len(turns) for turns in rewards])[:-1]
    states = np.split(group_states(members), cuts)
    parts = grouped_gae(rewards, states, discount=cfg.state_discount, trace=cfg.state_lambda)
    flat = np.concatenate(parts)
    if normalize_std and (not flat.size or flat.max() == flat.min()):
        flat = np.zeros_like(flat)
    elif normalize_std:
        flat = (flat - flat.mean()) / (flat.std() + STD_EPSILON)
    return by_member(flat, rewards)


def formula(cfg: AlgorithmSection, baseline: Baseline, normalize_std: bool) -> str:
    gae_text = f"GAE(per turn, gamma={cfg.state_discount:g}, lambda={cfg.state_lambda:g}"
    text = f"{gae_text}, V=mean_same_state G, {returns_formula(cfg)})"
    return f"standardize_group_turns({text})" if normalize_std else text


GAGPO = TurnCredit(
    credit=credit, formula=formula, keys=("state_discount", "state_lambda"), is_whole=True
)
