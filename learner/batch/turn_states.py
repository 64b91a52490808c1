"""Fingerprints of the states and actions of a group's turns."""

import hashlib
from collections.abc import Sequence

import numpy as np

from common.segments import asides_of
from common.wire.messages import Trajectory


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
