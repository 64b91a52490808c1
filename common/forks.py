"""Forks: episodes that continue the episode of another member of their group, their trunk.

A fork has the trunk's tokens up to its first own turn. They are context there, so that each sampled
token is trained once: in the trunk.

Example (two shared turns): the trunk is [p a q b r c], of which a, b and c are sampled. Its fork is
[p a q b r d s e], of which d and e are sampled.
"""

import hashlib
from dataclasses import replace

import numpy as np

from common.segments import as_context, joined, split_end
from common.wire.messages import Trajectory


def shared_digest(trajectory: Trajectory, num_turns: int) -> int:
    """Return a digest of 63 bits of the sampled tokens of an episode's first turns."""
    is_shared = trajectory.loss_mask & (trajectory.turn_ids < num_turns)
    return token_digest(trajectory.token_ids[is_shared])


def token_digest(token_ids: np.ndarray) -> int:
    """Return a digest of 63 bits of tokens, [num] int32."""
    digest = hashlib.blake2b(token_ids.tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def as_fork(trajectory: Trajectory, *, trunk: int, num_shared_turns: int) -> Trajectory:
    """Return an episode whose first turns are those of its trunk, as the fork that is trained.

    Rows without a token of its own are left out.

    Args:
        trunk: member number of the trunk.
        num_shared_turns: fewer than the turns of the episode.
    """
    return replace(
        from_turn(trajectory, num_shared_turns),
        trunk=trunk,
        num_shared_turns=num_shared_turns,
        shared_digest=shared_digest(trajectory, num_shared_turns),
    )


def from_turn(trajectory: Trajectory, num_turns: int) -> Trajectory:
    """Return an episode whose first turns are context. Rows without another turn are left out."""
    whole, end = split_end(trajectory)
    rows = [_forked(row, num_turns) for row in whole]
    rows = [row for row in rows if row.loss_mask.any()] or rows[-1:]
    return joined([*rows, end] if end is not None else rows)


def _forked(row: Trajectory, num_shared_turns: int) -> Trajectory:
    """Return a row in which the tokens of the shared turns are context."""
    is_shared = row.turn_ids < num_shared_turns
    columns = as_context(
        {name: getattr(row, name) for name in ("loss_mask", "logprobs", "versions")}
    )
    parted = {
        name: np.where(is_shared, column, getattr(row, name)) for name, column in columns.items()
    }
    return replace(row, **parted)
