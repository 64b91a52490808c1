"""Packs sequences into a single row: the attention between tokens and the outputs to read."""
# torch's type stubs lack numpy's element types:
# pyright: reportUnknownMemberType=false

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

CHUNK_TOKENS = 128  # Queries of one piece of a sequence; the piece omits all later keys.
MAX_FILL = 1.5  # Limit of a block's pairs with filling, relative to the real pairs of its pieces.
# Limit of pairs per head in a block of several pieces: the scores fit into the cache.
MAX_PAIRS = 1 << 18
# Multiples of row and piece sizes, and the row length above which rows are filled. A CPU compiles a
# kernel for each new size, so few sizes are better.
ROW_MULTIPLE = 64
PIECE_MULTIPLE = 16
FILLED_FROM_TOKENS = 512
MAX_READ_FRAC = 0.9  # A row is computed whole if more than this fraction of its tokens is read.

# Rows of a piece's queries, and of the keys up to its last query.
Piece = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows [piece, entry] of a block; a single piece with contiguous rows also has their slice."""

    index: Tensor = field(repr=False)  # [piece * entry] int64
    shape: tuple[int, int]
    stretch: slice | None = None

    def of(self, values: Tensor) -> Tensor:
        """Return `values` [seq, width] as [piece, entry, width]."""
        if self.stretch is not None:
            return values[self.stretch][None]
        return values.index_select(0, self.index).view(*self.shape, -1)


@dataclass(frozen=True, slots=True)
class PairBlock:
    """Pieces of similar lengths whose attention is one batch of matrix products.

    The queries of a piece are adjacent. Its keys are all keys up to its last query. A shorter piece
    is filled with copies of a query, which are not real. It is also filled with copies of a key
    that only these queries would attend to.
    """

    queries: Rows
    keys: Rows
    first_hidden: int  # First key that is hidden from some query of some piece.
    later: Tensor = field(repr=False)  # [piece or 1, query, key from first_hidden] 0; -inf: hidden
    # [piece * query] bool; None: all queries are real
    real: Tensor | None = field(repr=False, default=None)
    # [real query] int64, indices into the row
    real_rows: Tensor | None = field(repr=False, default=None)


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
    # Blocks in which each query is real once.
    blocks: Callable[[], Sequence[PairBlock]] = field(repr=False)
    # [key] int64; None: the rows of the queries
    key_rows: Tensor | None = field(repr=False, default=None)
    # [row] int64; None: all rows are read
    read_rows: Tensor | None = field(repr=False, default=None)


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


def pack(
    parts: Sequence[tuple[int, np.ndarray]], read: Sequence[np.ndarray], device: torch.device | str
) -> Packing:
    """Return the packing of a row.

    Args:
        parts: (number of queries, rows of its keys) for each sequence.
        read: rows of each sequence whose last hidden states are read.
    """
    lengths = tuple(length for length, _ in parts)
    key_lengths = tuple(len(keys) for _, keys in parts)

    def bounds(of: tuple[int, ...]) -> Tensor:
        return torch.from_numpy(np.cumsum([0, *of]).astype(np.int32)).to(device)

    key_rows = None
    if lengths != key_lengths:
        key_rows = torch.from_numpy(np.concatenate([keys for _, keys in parts])).to(device)
    rows, total = np.unique(np.concatenate(read)), sum(lengths)
    read_rows = None
    if len(rows) < MAX_READ_FRAC * total:
        others = np.setdiff1d(np.arange(total), rows)[: -len(rows) % ROW_MULTIPLE]
        if total > FILLED_FROM_TOKENS:
            rows = np.concatenate([rows, others])
        read_rows = torch.from_numpy(rows).to(device)
    return Packing(
        lengths,
        key_lengths,
        bounds(lengths),
        bounds(key_lengths),
        cache(partial(_blocks, parts, device)),  # Fused kernels never request the blocks.
        key_rows,
        read_rows,
    )


def _blocks(parts: Sequence[tuple[int, np.ndarray]], device: torch.device | str) -> list[PairBlock]:
    return [_block(pieces, device) for pieces in _similar(_pieces(parts))]


def _pieces(parts: Sequence[tuple[int, np.ndarray]]) -> list[Piece]:
    found: list[Piece] = []
    first = 0  # First query of the sequence.
    for length, keys in parts:
        for start in range(0, length, CHUNK_TOKENS):
            end = min(start + CHUNK_TOKENS, length)
            found.append((first + np.arange(start, end), keys[: len(keys) - length + end]))
        first += length
    return found


def _similar(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Return the pieces in blocks of similar lengths, which need little filling."""
    blocks: list[list[Piece]] = []
    # Last block: its sum of real pairs, and the most keys and queries of a piece.
    pairs = num_keys = num_queries = 0
    for piece in sorted(pieces, key=lambda each: (-len(each[1]), -len(each[0]))):
        own = len(piece[0]) * len(piece[1])
        most = max(num_queries, len(piece[0]))
        size = (len(blocks[-1]) + 1) * _up(num_keys) * _up(most) if blocks else 0
        if not blocks or size > min(MAX_PAIRS, MAX_FILL * (pairs + own)):
            blocks.append([])
            pairs, num_keys, most = 0, len(piece[1]), len(piece[0])
        blocks[-1].append(piece)
        pairs = pairs + own
        num_queries = most
    return blocks


def _block(pieces: Sequence[Piece], device: torch.device | str) -> PairBlock:
    queries, keys = ([piece[i] for piece in pieces] for i in (0, 1))
    # Number of keys before the first query of each piece.
    earlier = np.array([len(own) - len(asked) for asked, own in pieces])
    most = max(map(len, queries)), max(map(len, keys))
    if len(pieces) > 1:
        most = (_up(most[0]), _up(most[1]))
    seen_up_to = np.arange(most[0]) + np.unique(earlier)[:, None]
    if len(seen_up_to) > 1:
        seen_up_to = np.arange(most[0]) + earlier[:, None]  # [piece, query]
    first = int(earlier.min())
    is_later = np.arange(first, most[1]) > seen_up_to[..., None]  # [piece or 1, query, key]
    real = real_rows = None
    lengths = np.array([len(own) for own in queries])
    if len({*lengths, most[0]}) > 1:
        real = torch.from_numpy((np.arange(most[0]) < lengths[:, None]).ravel()).to(device)
        real_rows = torch.from_numpy(np.concatenate(queries)).to(device)
    return PairBlock(
        _filled(queries, most[0], device),
        _filled(keys, most[1], device),
        first,
        torch.from_numpy(np.where(is_later, np.float32(-np.inf), np.float32(0))).to(device),
        real,
        real_rows,
    )


def _up(size: int) -> int:
    return -(-size // PIECE_MULTIPLE) * PIECE_MULTIPLE


def _filled(rows: Sequence[np.ndarray], most: int, device: torch.device | str) -> Rows:
    whole = [np.concatenate([own, np.full(most - len(own), own[0])]) for own in rows]
    stretch = None
    if len(rows) == 1 and rows[0][-1] - rows[0][0] == most - 1:
        stretch = slice(int(rows[0][0]), int(rows[0][-1]) + 1)
    index = torch.from_numpy(np.concatenate(whole)).to(device)
    return Rows(index, (len(rows), most), stretch)
