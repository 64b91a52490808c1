"""Rows as paths of prefix trees: order, common first tokens, and cuts into microbatches.

In the order of a forest adjacent rows have the longest common beginnings. A row shares tokens with
the row before it, so a tree of any depth is one number for each row.

Example: the rows [p a], [p b c], [p b d e] and [q] share 0, 1, 2 and 0 tokens with the row before.
They have 9 tokens, and their trees 6: a cut before the third row computes 2 tokens again.

Source: Tree Training, arXiv:2511.00413.
"""
# torch's type stubs lack numpy's element types:
# pyright: reportUnknownMemberType=false

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from common.wire.messages import Trajectory
from learner.batch.packing import unlike_records

# Minimal length of a common beginning; sharing a shorter one costs more than it saves.
MIN_SHARED_TOKENS = 8
MARKED_LAYERS = 8  # Layers whose experts order rows with equal tokens.
MARK_BASE = 1_000_003  # An odd number; products wrap around.


@dataclass(frozen=True, slots=True)
class Forest:
    """Rows in the order of their tokens."""

    order: list[int]  # Indices of the rows.
    shared: list[int]  # First tokens of each row that it shares with the row before, in this order.

    def num_scored(self, rows: Sequence[Trajectory]) -> int:
        """Return the number of sampled tokens, those that several rows share once."""
        num = 0
        path = np.zeros(0, dtype=np.bool_)  # Whether the token is sampled in a row of the path.
        for index, shared in zip(self.order, self.shared, strict=True):
            mask = rows[index].loss_mask
            before = path[:shared]
            num += int(mask.sum()) - int((mask[:shared] & before).sum())
            path = np.concatenate([mask[:shared] | before, mask[shared:]])
        return num


def forest_of(rows: Sequence[Trajectory]) -> Forest:
    """Return the forest of rows.

    A common beginning ends where recorded experts differ: one copy of a token has one record.
    """
    keys = [_key_of(row) for row in rows]
    order = sorted(range(len(rows)), key=lambda index: keys[index])
    shared = [_num_common(rows[a], rows[b]) for a, b in pairwise(order)]
    return Forest(order, [0, *shared] if order else [])


def _key_of(row: Trajectory) -> bytes:
    """Return bytes in whose order rows with equal first tokens and records are adjacent."""
    ids = row.token_ids.astype(">u4")  # Bytes of big-endian numbers have the numbers' order.
    if not row.expert_mask.size:
        return ids.tobytes()
    columns = np.zeros(len(ids), dtype=[("id", ">u4"), ("record", ">u8")])
    columns["id"] = ids
    # A few layers tell most records apart. The common tokens are compared in all layers.
    chosen = row.expert_ids[:, :: max(1, row.expert_ids.shape[1] // MARKED_LAYERS)]
    chosen = chosen.reshape(len(ids), -1).astype(np.uint64) + np.uint64(1)
    powers = np.uint64(MARK_BASE) ** np.arange(chosen.shape[1], dtype=np.uint64)
    columns["record"] = (chosen * powers).sum(1) * row.expert_mask
    return columns.tobytes()


def _num_common(first: Trajectory, other: Trajectory) -> int:
    """Return the number of common first tokens with equal records; 0 for few."""
    end = min(len(first.token_ids), len(other.token_ids))
    unlike = np.flatnonzero(first.token_ids[:end] != other.token_ids[:end])
    end = int(unlike[0]) if unlike.size else end
    unlike = unlike_records(first, other, end)
    end = int(unlike[0]) if unlike.size else end
    return end if end >= MIN_SHARED_TOKENS else 0


def cut(lengths: Sequence[int], shared: Sequence[int], *, max_tokens: int) -> list[range]:
    """Return adjacent rows whose trees have at most `max_tokens` tokens, or one row with more.

    A cut repeats the tokens that the row after it shares with the row before it. The cuts repeat
    the fewest tokens, and of those the fewest cuts are made. Rows that share nothing are apart.

    Args:
        lengths, shared: tokens of each row, and those that it shares with the row before.
    """
    pieces: list[range] = []
    if not lengths:
        return pieces
    ends = [index for index, num in enumerate(shared) if index and not num]
    first = 0
    for end in [*ends, len(lengths)]:
        of_tree = np.asarray(lengths[first:end]), np.asarray(shared[first:end])
        starts = [first + start for start in _cuts(*of_tree, max_tokens)]
        pieces += [range(a, b) for a, b in zip(starts, [*starts[1:], end], strict=True)]
        first = end
    return pieces


def _cuts(lengths: np.ndarray, shared: np.ndarray, max_tokens: int) -> list[int]:
    """Return the first rows of the pieces of one tree, by dynamic programming."""
    ends = np.cumsum(lengths - shared)  # [row] tokens of the tree up to a row.
    if ends[-1] <= max_tokens:
        return [0]
    num_rows = len(lengths)
    # A piece that starts at a row has so many tokens, less those of the tree up to its last row.
    offsets = lengths - ends
    # Repeated tokens and the number of pieces, as one number: the first counts more.
    costs = shared * (num_rows + 1) + 1
    best = np.zeros(num_rows + 1, dtype=np.int64)  # Least cost of the rows before a row.
    starts = np.zeros(num_rows, dtype=np.int64)  # Start of the last piece, by its last row.
    for last in range(num_rows):
        totals = best[: last + 1] + costs[: last + 1]
        does_fit = offsets[: last + 1] + ends[last] <= max_tokens
        does_fit[last] = True
        starts[last] = int(np.argmin(np.where(does_fit, totals, np.iinfo(np.int64).max)))
        best[last + 1] = totals[starts[last]]
    cuts: list[int] = []
    last = num_rows - 1
    while last >= 0:
        cuts.append(int(starts[last]))
        last = cuts[-1] - 1
    return cuts[::-1]
