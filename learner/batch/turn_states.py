"""Which turns of a group were taken in the same state, and what each turn did there."""

import hashlib
from collections.abc import Sequence

import numpy as np

from common.segments import asides_of
from common.wire.messages import Trajectory


def turn_states(trajectory: Trajectory) -> np.ndarray:
    """Return the fingerprint of the state that each turn was taken in, [num_turns] int32.

    Where none were told, as in the journals of older versions, what the agent saw before the turn
    stands for the state: all tokens that it did not sample since the turn before.
    """
    if len(trajectory.turn_states) == trajectory.num_turns:
        return trajectory.turn_states
    return _digests(trajectory, ~trajectory.loss_mask)


def turn_actions(trajectory: Trajectory) -> np.ndarray:
    """Return the fingerprint of the action that each turn sent to its environment, [num_turns].

    Where an actor sent none, as in the journals of older versions, the sampled tokens of the turn
    stand for it, less plans, reflections and others that no environment sees.
    """
    if len(trajectory.turn_actions) == trajectory.num_turns:
        return trajectory.turn_actions
    chosen = trajectory.loss_mask.copy()
    for first, end, _ in asides_of(trajectory):
        chosen[first:end] = False
    return _digests(trajectory, chosen)


def _digests(trajectory: Trajectory, chosen: np.ndarray) -> np.ndarray:
    turns = trajectory.turn_ids
    numbers = np.zeros(trajectory.num_turns, dtype=np.int32)
    for turn in range(trajectory.num_turns):
        ids = np.ascontiguousarray(trajectory.token_ids[chosen & (turns == turn)], dtype=np.int32)
        digest = hashlib.blake2b(ids.tobytes(), digest_size=4).digest()
        numbers[turn] = np.frombuffer(digest, dtype=np.int32)[0]
    return numbers


def places(keys: Sequence[tuple[np.ndarray, ...]]) -> np.ndarray:
    """Return a number for each entry [entries] int64, equal where all of its keys are.

    Args:
        keys: of each member, columns of one length; entries follow one another member by member.
    """
    numbers: dict[tuple[int, ...], int] = {}
    rows = [row for columns in keys for row in zip(*(c.tolist() for c in columns), strict=True)]
    return np.array([numbers.setdefault(row, len(numbers)) for row in rows], dtype=np.int64)
