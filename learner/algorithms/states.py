"""States and actions of a group's turns, for credit that compares turns in the same state.

Entries are the turns of all members of a group, one after another. Turns with the same number in
`states` started in the same state.
"""
# torch's type stubs lack numpy's element types:
# pyright: reportUnknownMemberType=false

import hashlib
from collections.abc import Sequence

import numpy as np

from common.config.algorithm import AlgorithmSection
from common.segments import asides_of
from common.wire.messages import Trajectory
from learner.algorithms.interface import tensor_of
from learner.algorithms.rewards import discounted_returns, paid_formula


def turn_states(trajectory: Trajectory) -> np.ndarray:
    """Return the fingerprint of the state in which each turn started, [num_turns] int32.

    Journals of older versions contain no states. The observation before the turn then replaces the
    state: all tokens since the previous turn that were not sampled.
    """
    if len(trajectory.turn_states) == trajectory.num_turns:
        return trajectory.turn_states
    return _digests(trajectory, ~trajectory.loss_mask)


def turn_actions(trajectory: Trajectory) -> np.ndarray:
    """Return the fingerprint of the action that each turn sent to its environment, [num_turns].

    Journals of older versions contain no actions. The turn's sampled tokens then replace the
    action, without plans, reflections and other tokens that no environment receives.
    """
    if len(trajectory.turn_actions) == trajectory.num_turns:
        return trajectory.turn_actions
    chosen = trajectory.loss_mask.copy()
    for first, end, _ in asides_of(trajectory):
        chosen[first:end] = False
    return _digests(trajectory, chosen)


def _digests(trajectory: Trajectory, chosen: np.ndarray) -> np.ndarray:
    """Return a hash of the chosen tokens of each turn, [num_turns] int32."""
    turns = trajectory.turn_ids
    numbers = np.zeros(trajectory.num_turns, dtype=np.int32)
    for turn in range(trajectory.num_turns):
        ids = np.ascontiguousarray(trajectory.token_ids[chosen & (turns == turn)], dtype=np.int32)
        digest = hashlib.blake2b(ids.tobytes(), digest_size=4).digest()
        numbers[turn] = np.frombuffer(digest, dtype=np.int32)[0]
    return numbers


def places(keys: Sequence[tuple[np.ndarray, ...]]) -> np.ndarray:
    """Return a number for each entry [entries] int64; entries with equal keys have equal numbers.

    Args:
        keys: for each member, columns of equal length; entries are ordered member by member.
    """
    numbers: dict[tuple[int, ...], int] = {}
    rows = [row for columns in keys for row in zip(*(c.tolist() for c in columns), strict=True)]
    return np.array([numbers.setdefault(row, len(numbers)) for row in rows], dtype=np.int64)


def group_states(members: Sequence[Trajectory]) -> np.ndarray:
    """Return the number of the state in which each turn of the group started, [entry] int64."""
    return places([(turn_states(member),) for member in members])


def group_actions(members: Sequence[Trajectory]) -> np.ndarray:
    """Return the number of the pair of state and action of each turn, [entry] int64."""
    return places([(turn_states(member), turn_actions(member)) for member in members])


def returns_of(rewards: Sequence[np.ndarray], cfg: AlgorithmSection) -> np.ndarray:
    """Return the return from each turn on, with `state_discount`, [entry].

    Args:
        rewards: for each member [num_turns], the reward of each turn.
    """
    discount = cfg.state_discount
    return np.concatenate(
        [discounted_returns(tensor_of(turns), discount=discount).numpy() for turns in rewards]
    )


def returns_formula(cfg: AlgorithmSection) -> str:
    """Return the formula of the return G of a turn."""
    return f"G=sum_later_turns {cfg.state_discount:g}^k*({paid_formula(cfg)})"


def by_member(credit: np.ndarray, rewards: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the credit [entry] of each member's turns, [num_turns] float32 each."""
    cuts = np.cumsum([len(turns) for turns in rewards])[:-1]
    return [part.astype(np.float32) for part in np.split(credit, cuts)]


def mean_per_state(values: np.ndarray, states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return [entry] counts of the entries in the same state, and the means of their values."""
    counts = np.bincount(states)
    means = np.bincount(states, weights=values) / np.maximum(counts, 1)
    return counts[states].astype(np.float64), means[states]


def is_flat(values: np.ndarray, states: np.ndarray) -> np.ndarray:
    """Return [entry] bool: whether all values in the entry's state are equal."""
    num_states = int(states.max()) + 1 if states.size else 0
    low = np.full(num_states, np.inf)
    high = np.full(num_states, -np.inf)
    np.minimum.at(low, states, values)
    np.maximum.at(high, states, values)
    return (low == high)[states]
