"""Sequences that follow one another in a single row: who sees whom, and what of it is read."""
# torch's type stubs know nothing of numpy's element types:
# pyright: reportUnknownMemberType=false

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

CHUNK_TOKENS = 128  # of a sequence: queries of a piece; keys that come later are left out
MAX_FILL = 1.5  # pairs of a block, filled up, over those of its pieces
MAX_PAIRS = 1 << 18  # of a block of several pieces, per head: their scores stay in the cache
# Of rows of many tokens: a CPU makes a kernel for each new size, so few sizes are better.
ROW_MULTIPLE = 64
PIECE_MULTIPLE = 16
FILLED_FROM_TOKENS = 512
MAX_READ_FRAC = 0.9  # of a row's tokens, beyond which it is computed whole

Piece = tuple[np.ndarray, np.ndarray]  # rows of its queries, and of the keys up to its last query


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows [piece, entry] of a block; of a single piece that lies in one stretch, the stretch."""

    index: Tensor = field(repr=False)  # [piece * entry] int64
    shape: tuple[int, int]
    stretch: slice | None = None

    def of(self, values: Tensor) -> Tensor:
        """Return [piece, entry, width] of [seq, width]."""
        if self.stretch is not None:
            return values[self.stretch][None]
        return values.index_select(0, self.index).view(*self.shape, -1)


@dataclass(frozen=True, slots=True)
class PairBlock:
    """Pieces of sequences, of similar lengths, whose attention is one batch of matrix products.

    A piece's queries are neighbours, its keys all up to the last of them. A shorter piece is filled
    up with any query, which is not real, and any key, which only such queries would see.
    """

    queries: Rows
    keys: Rows
    first_hidden: int  # the key from which on some query of some piece may not see it
    later: Tensor = field(repr=False)  # [piece or 1, query, key from first_hidden] 0; -inf: hidden
    real: Tensor | None = field(repr=False, default=None)  # [piece * query] bool; None: all are
    real_rows: Tensor | None = field(repr=False, default=None)  # [real query] int64, into the row


@dataclass(frozen=True, slots=True)
class Packing:
    """Who sees whom in a row of packed sequences: each query the keys up to its own.

    A prefix that several sequences share is a sequence by itself; they begin after it in queries,
    and with it in keys.
    """

    lengths: tuple[int, ...]  # of each sequence in queries; nothing lies between them
    key_lengths: tuple[int, ...]  # in keys
    bounds: Tensor = field(repr=False)  # [sequence + 1] int32, where each begins, and the end
    key_bounds: Tensor = field(repr=False)  # [sequence + 1] int32
    blocks: Callable[[], Sequence[PairBlock]] = field(repr=False)  # each query is real in one
    key_rows: Tensor | None = field(repr=False, default=None)  # [key] int64; None: those of queries
    read_rows: Tensor | None = field(repr=False, default=None)  # [row] int64; None: all are read


def packed_rows(
    sequences: Sequence[np.ndarray], shared: Sequence[tuple[int, int]]
) -> tuple[list[np.ndarray], list[tuple[int, np.ndarray]], tuple[int, int]]:
    """Return the rows of each sequence's tokens, of each part (queries, keys), and the shape.

    Args:
        shared: of each run of neighbours, (how many, length of the prefix that they share).
    """
    rows: list[np.ndarray] = []
    parts: list[tuple[int, np.ndarray]] = []
    total, index = 0, 0
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
    if filling and total > FILLED_FROM_TOKENS:  # a sequence of its own that nobody reads
        parts.append((filling, total + np.arange(filling)))
        total += filling
    return rows, parts, (1, total)


def pack(
    parts: Sequence[tuple[int, np.ndarray]], read: Sequence[np.ndarray], device: torch.device | str
) -> Packing:
    """Return who sees whom.

    Args:
        parts: of each sequence (queries, rows of its keys).
        read: rows whose last hidden states are read, of each sequence.
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
        cache(partial(_blocks, parts, device)),  # which fused kernels never ask for
        key_rows,
        read_rows,
    )


def _blocks(parts: Sequence[tuple[int, np.ndarray]], device: torch.device | str) -> list[PairBlock]:
    return [_block(pieces, device) for pieces in _similar(_pieces(parts))]


def _pieces(parts: Sequence[tuple[int, np.ndarray]]) -> list[Piece]:
    found: list[Piece] = []
    first = 0  # where a sequence's queries begin
    for length, keys in parts:
        for start in range(0, length, CHUNK_TOKENS):
            end = min(start + CHUNK_TOKENS, length)
            found.append((first + np.arange(start, end), keys[: len(keys) - length + end]))
        first += length
    return found


def _similar(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Return the pieces in blocks of similar lengths, in which little has to be filled up."""
    blocks: list[list[Piece]] = []
    pairs = num_keys = num_queries = 0  # of the last block: of its pieces; most of a piece
    for piece in sorted(pieces, key=lambda each: (-len(each[1]), -len(each[0]))):
        own = len(piece[0]) * len(piece[1])
        most = max(num_queries, len(piece[0]))
        size = (len(blocks[-1]) + 1) * _up(num_keys) * _up(most) if blocks else 0
        if not blocks or size > min(MAX_PAIRS, MAX_FILL * (pairs + own)):
            blocks.append([])
            pairs, num_keys, most = 0, len(piece[1]), len(piece[0])
        blocks[-1].append(piece)
        pairs, num_queries = pairs + own, most
    return blocks


def _block(pieces: Sequence[Piece], device: torch.device | str) -> PairBlock:
    queries, keys = ([piece[i] for piece in pieces] for i in (0, 1))
    earlier = np.array([len(own) - len(asked) for asked, own in pieces])  # keys before its queries
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
