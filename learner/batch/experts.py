"""The experts that engines chose, as a column of trajectories and as tensors of a block."""
# torch's type stubs lack numpy's element types:
# pyright: reportUnknownMemberType=false

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from common.wire.messages import Trajectory
from learner.batch.device_copy import placed

Recorded = tuple[np.ndarray, np.ndarray]  # ids [seq, layer, chosen], mask [seq]


@dataclass(frozen=True, slots=True)
class Routes:
    """The recorded experts of a block's positions."""

    ids: Tensor = field(repr=False)  # [batch * seq, layer, chosen] uint8 or int16
    mask: Tensor = field(repr=False)  # [batch * seq] bool, True on positions with a record


def recorded_of(trajectories: Sequence[Trajectory]) -> list[Recorded | None] | None:
    """Return the records of trajectories; None if there are none at all."""
    if not any(each.expert_mask.size for each in trajectories):
        return None
    return [(t.expert_ids, t.expert_mask) if t.expert_mask.size else None for t in trajectories]


def unlike_records(first: Trajectory, other: Trajectory, end: int) -> np.ndarray:
    """Return the positions before `end` at which the records of two trajectories differ."""
    if not first.expert_mask.size or not other.expert_mask.size:
        return np.flatnonzero((first if first.expert_mask.size else other).expert_mask[:end])
    mask = first.expert_mask[:end]
    is_unlike = mask != other.expert_mask[:end]
    is_unlike |= mask & (first.expert_ids[:end] != other.expert_ids[:end]).any((1, 2))
    return np.flatnonzero(is_unlike)


def place_routes(
    recorded: Sequence[Recorded | None],
    rows: Sequence[np.ndarray],
    num_rows: int,
    device: torch.device | str,
) -> Routes:
    """Return the routes of a block.

    Args:
        recorded: records of each sequence; None: there are none.
        rows: [seq] rows of each sequence in the block.
        num_rows: number of all rows of the block.

    Raises: ValueError: sequences that share a row have unlike records of it.
    """
    first = next(each for each in recorded if each is not None)
    ids = np.zeros((num_rows, *first[0].shape[1:]), dtype=first[0].dtype)
    mask = np.zeros(num_rows, dtype=bool)
    for each, own in zip(recorded, rows, strict=True):
        if each is not None:
            known = own[each[1]]
            again = mask[known]
            if not np.array_equal(ids[known[again]], each[0][each[1]][again]):
                raise ValueError("sequences with unlike records of experts share a prefix")
            ids[known] = each[0][each[1]]
            mask[known] = True
    return Routes(**placed({"ids": ids, "mask": mask}, device))
