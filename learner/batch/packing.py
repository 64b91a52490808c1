"""Packs sequences into a single row: the attention between tokens."""
# torch's type stubs lack numpy's element types:
# pyright: reportUnknownMemberType=false

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

CHUNK_TOKENS = 128  # Queries of one piece of a sequence; the piece omits all later keys.
# Multiple of row sizes, and the row length above which rows are filled. A CPU compiles a kernel for
# each new size, so few sizes are better.
ROW_MULTIPLE = 64
FILLED_FROM_TOKENS = 512


@dataclass(frozen=True, slots=True)
class PairBlock:
    """A piece of a sequence whose attention is one batch of matrix products.

    The queries are adjacent rows. The keys are all keys up to the last query.
    """

    queries: slice
    # [key] int64; a slice: the rows are adjacent
    keys: slice | Tensor = field(repr=False)
    num_earlier: int  # Keys before the first query, which every query attends to.
    later: Tensor = field(repr=False)  # [query, key from num_earlier] 0; -inf: hidden


@dataclass(frozen=True, slots=True)
class Packing:
    """The attention pattern of a packed row: each query attends to the keys up to its own.

    A prefix that several sequences share is a sequence of its own. The queries of these sequences
    start after the prefix, and their keys include it.
    """

    lengths: tuple[int, ...]  # Number of queries in each sequence; sequences are contiguous.
    key_lengths: tuple[int, ...]  # Number of keys in each sequence.
    bounds: Tensor = field(repr=False)  # [sequence + 1] int32, start of each sequence, and the end
    key_bounds: Tensor = field(repr=False)  # [sequence + 1] int32
    # Blocks that hold each query once.
    blocks: Callable[[], Sequence[PairBlock]] = field(repr=False)
    # [key] int64; None: the rows of the queries
    key_rows: Tensor | None = field(repr=False, default=None)


def packed_rows(
    sequences: Sequence[np.ndarray], shared: Sequence[tuple[int, int]]
) -> tuple[list[np.ndarray], list[tuple[int, np.ndarray]], tuple[int, int]]:
    """Return each sequence's rows, each part as (number of queries, rows of keys), and the shape.

    Args:
        shared: (count, shared prefix length) for each run of adjacent sequences.
    """
    rows: list[np.ndarray] = []
    parts: list[tuple[int, np.ndarray]] = []
    total = 0
    index = 0
    for number, prefix in shared or [(1, 0)] * len(sequences):
        head = total + np.arange(prefix)
        if prefix:
            parts.append((prefix, head))
            total += prefix
        for sequence in sequences[index : index + number]:
            tail = len(sequence) - prefix
            rows.append(np.concatenate([head, total + np.arange(tail)]))
            parts.append((tail, rows[-1]))
            total += tail
        index += number
    filling = -total % ROW_MULTIPLE
    # The filling is a separate sequence whose outputs are never read.
    if filling and total > FILLED_FROM_TOKENS:
        parts.append((filling, total + np.arange(filling)))
        total += filling
    return rows, parts, (1, total)


def pack(parts: Sequence[tuple[int, np.ndarray]], device: torch.device | str) -> Packing:
    """Return the packing of a row.

    Args:
        parts: (number of queries, rows of its keys) for each sequence.
    """
    lengths = tuple(length for length, _ in parts)
    key_lengths = tuple(len(keys) for _, keys in parts)

    def bounds(of: tuple[int, ...]) -> Tensor:
        return torch.from_numpy(np.cumsum([0, *of]).astype(np.int32)).to(device)

    key_rows = None
    if lengths != key_lengths:
        key_rows = torch.from_numpy(np.concatenate([keys for _, keys in parts])).to(device)
    return Packing(
        lengths,
        key_lengths,
        bounds(lengths),
        bounds(key_lengths),
        cache(partial(_blocks, parts, device)),  # Fused kernels never request the blocks.
        key_rows,
    )


def _blocks(parts: Sequence[tuple[int, np.ndarray]], device: torch.device | str) -> list[PairBlock]:
    found: list[PairBlock] = []
    first = 0  # First query of the sequence.
    for length, keys in parts:
        for start in range(0, length, CHUNK_TOKENS):
            end = min(start + CHUNK_TOKENS, length)
            num_keys = len(keys) - length + end
            queries = slice(first + start, first + end)
            found.append(_block(queries, keys[:num_keys], device))
        first += length
    return found


def _block(queries: slice, keys: np.ndarray, device: torch.device | str) -> PairBlock:
    num_queries = queries.stop - queries.start
    is_adjacent = keys[-1] - keys[0] == len(keys) - 1
    later = torch.full((num_queries, num_queries), -torch.inf, device=device).triu(1)
    return PairBlock(
        queries,
        slice(int(keys[0]), int(keys[-1]) + 1)
        if is_adjacent
        else torch.from_numpy(keys).to(device),
        len(keys) - num_queries,
        later,
    )
