"""Packing of rows: prefix trees, attention patterns, recorded experts, and copies to a device.

A row is a path of a prefix tree. In the order of a forest adjacent rows have the longest common
beginnings. A row shares tokens with the row before it, so a tree of any depth is one number for
each row.

Example: the rows [p a], [p b c], [p b d e] and [q] share 0, 1, 2 and 0 tokens with the row before.
They have 9 tokens, and their trees 6: a cut before the third row computes 2 tokens again.

All arrays of a microbatch move in one copy that the host does not wait for. Packing puts sequences
into a single row. Records are the experts that engines chose.

Source: Tree Training, arXiv:2511.00413.
"""
# torch's type stubs lack numpy's element types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from common.wire.messages import Trajectory

ALIGN_BYTES = 16  # Every array starts at a multiple of this, so a view of any dtype is legal.
CHUNK_TOKENS = 128  # Queries of one piece of a sequence; the piece omits all later keys.
# Kernels of some devices are compiled or planned for each new size, so few sizes are better. A size
# is rounded up to a multiple of its largest power of two / `STEPS_PER_OCTAVE`, or of a minimum.
STEPS_PER_OCTAVE = 16  # Rounding adds at most 1/16 to a large size, and half of that on average.
ROW_MULTIPLE = 64
SHORT_ROW_MULTIPLE = 32  # Multiple of the sizes of rows below `FILLED_FROM_TOKENS`.
FILLED_FROM_TOKENS = 512
LENGTH_MULTIPLE = 128  # Flash attention computes blocks of 128 queries.
COUNT_MULTIPLE = 8  # Multiple of the number of sequences.
COARSE_STEPS = 8  # Steps per octave of sizes whose rounding costs no arithmetic.

# Minimal length of a common beginning; sharing a shorter one costs more than it saves.
MIN_SHARED_TOKENS = 8
MARKED_LAYERS = 8  # Layers whose experts order rows with equal tokens.
MARK_BASE = 1_000_003  # An odd number; products wrap around.

Recorded = tuple[np.ndarray, np.ndarray]  # ids [seq, layer, chosen], mask [seq]


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


def placed(arrays: Mapping[str, np.ndarray], device: torch.device | str) -> dict[str, Tensor]:
    """Return arrays as tensors on a device, by the same names.

    On a CPU they share the memory of the arrays. Other devices get one copy of all bytes: a copy
    from ordinary memory would wait for all earlier work of a GPU, so the bytes are in pinned memory
    there.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    starts: dict[str, int] = {}
    total = 0
    for name, array in arrays.items():
        starts[name] = total
        total += -(-array.nbytes // ALIGN_BYTES) * ALIGN_BYTES
    host = torch.empty(total, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = host.numpy()
    for name, array in arrays.items():
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        target[starts[name] : starts[name] + flat.size] = flat
    moved = host.to(device, non_blocking=True)
    return {
        name: _view(moved[starts[name] : starts[name] + array.nbytes], array)
        for name, array in arrays.items()
    }


def _view(part: Tensor, array: np.ndarray) -> Tensor:
    """Return a part of the copied bytes as a tensor like the array."""
    dtype = torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
    return part.view(dtype).view(array.shape)


def rounded(size: int, *, multiple: int, steps: int = STEPS_PER_OCTAVE) -> int:
    """Return a size rounded up to one of few sizes.

    Args:
        multiple: a power of two, the smallest step between two sizes.
        steps: a power of two, the number of sizes between a large power of two and the next one.
    """
    step = max(multiple, (1 << max(size, 1).bit_length() - 1) // steps)
    return -(-size // step) * step


def row_size(num_tokens: int) -> int:
    """Return the number of tokens of a row with its filling."""
    is_short = num_tokens <= FILLED_FROM_TOKENS
    return rounded(num_tokens, multiple=SHORT_ROW_MULTIPLE if is_short else ROW_MULTIPLE)


def padded_width(length: int) -> int:
    """Return the width of a padded block, given the length of its longest sequence.

    A width of 128 and more is a multiple of 8.
    """
    return rounded(length, multiple=1)


@dataclass(frozen=True, slots=True)
class PairBlock:
    """A piece of a sequence whose attention is one batch of matrix products.

    The queries are adjacent rows. The keys end with the last query. They begin with the sequence,
    or with the window of the first query.
    """

    queries: slice
    # [key] int64; a slice: the rows are adjacent
    keys: slice | Tensor = field(repr=False)
    num_earlier: int  # Keys at the start that every query attends to.
    hidden: Tensor = field(repr=False)  # [query, key from num_earlier] 0; -inf: hidden


@dataclass(frozen=True, slots=True)
class Packing:
    """The attention pattern of a packed row: each query attends to the keys up to its own.

    The sequences of a row are the paths of trees. The queries of a path are its new tokens, which
    are contiguous. Its keys begin with the tokens that an earlier path has computed.
    """

    lengths: tuple[int, ...]  # Number of queries in each sequence.
    key_lengths: tuple[int, ...]  # Number of keys in each sequence.
    # [sequence + 1] int32, starts of sequences and the end. Empty sequences follow the last one.
    bounds: Tensor = field(repr=False)
    key_bounds: Tensor = field(repr=False)  # [sequence + 1] int32
    # Blocks that hold each query once, by the number of keys that a query attends to; None: all.
    blocks: Callable[[int | None], Sequence[PairBlock]] = field(repr=False)
    # The same row with attention that ends at each multiple of a number of positions.
    chunked: Callable[[int], "Packing"] = field(repr=False)
    # The same row without the keys before the windows of all queries, by the window's keys.
    windowed: Callable[[int], "Packing"] = field(repr=False)
    # The same row as (queries, their packing), by the number of keys of a packing.
    divided: Callable[[int], Sequence[tuple[slice, "Packing"]]] = field(repr=False)
    # [key] int64; None: the rows of the queries
    key_rows: Tensor | None = field(repr=False, default=None)

    @property
    def max_length(self) -> int:
        """An upper bound of `lengths`."""
        return _upper_bound(self.lengths)

    @property
    def max_key_length(self) -> int:
        """An upper bound of `key_lengths`."""
        return _upper_bound(self.key_lengths)


def _upper_bound(lengths: tuple[int, ...]) -> int:
    return rounded(max(lengths), multiple=LENGTH_MULTIPLE, steps=COARSE_STEPS)


def packed_rows(
    sequences: Sequence[np.ndarray], shared: Sequence[int]
) -> tuple[list[np.ndarray], list[tuple[int, np.ndarray]], tuple[int, int]]:
    """Return each sequence's rows, each part as (number of queries, rows of keys), and the shape.

    Args:
        shared: number of first tokens whose rows are those of the sequence before, for each
            sequence. Empty: no sequence shares rows.

    Raises: ValueError: a sequence does not begin with the shared tokens of the one before.

    Example: sequences [p a], [p b c], [p b d e] and shared [0, 1, 2] have the row [p a b c d e]
        and the parts (2, [0 1]), (2, [0 2 3]), (2, [0 2 4 5]).
    """
    rows: list[np.ndarray] = []
    parts: list[tuple[int, np.ndarray]] = []
    total = 0
    before = np.zeros(0, dtype=np.int64)  # The sequence before, and its rows.
    places = np.zeros(0, dtype=np.int64)
    for sequence, num in zip(sequences, shared or [0] * len(sequences), strict=True):
        if num and not np.array_equal(sequence[:num], before[:num]):
            raise ValueError(f"two adjacent sequences do not begin with the same {num} tokens")
        tail = len(sequence) - num
        places = np.concatenate([places[:num], total + np.arange(tail)])
        before = sequence
        rows.append(places)
        if tail:
            parts.append((tail, places))
        total += tail
    filling = row_size(total) - total
    if filling:  # The filling is a separate sequence whose outputs are never read.
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
    num_empty = rounded(len(parts), multiple=COUNT_MULTIPLE, steps=COARSE_STEPS) - len(parts)

    def bounds(of: tuple[int, ...]) -> np.ndarray:
        return np.cumsum([0, *of, *[0] * num_empty]).astype(np.int32)

    arrays = {"bounds": bounds(lengths), "key_bounds": bounds(key_lengths)}
    if lengths != key_lengths:
        arrays["key_rows"] = np.concatenate([keys for _, keys in parts])
    moved = placed(arrays, device)
    return Packing(
        lengths,
        key_lengths,
        moved["bounds"],
        moved["key_bounds"],
        cache(partial(_blocks, parts, device)),  # Fused kernels never request the blocks.
        cache(partial(_pack_chunks, parts, device)),
        cache(partial(_pack_windows, parts, device)),
        cache(partial(_divide, parts, device)),
        moved.get("key_rows"),
    )


def _pack_chunks(
    parts: Sequence[tuple[int, np.ndarray]], device: torch.device | str, size: int
) -> Packing:
    """Return the packing in which each chunk of `size` positions of a sequence is a sequence."""
    pieces: list[tuple[int, np.ndarray]] = []
    for length, keys in parts:
        first = len(keys) - length  # Position of the first query.
        while first < len(keys):
            start = first // size * size
            end = min(start + size, len(keys))
            pieces.append((end - first, keys[start:end]))
            first = end
    return pack(pieces, device)


def _pack_windows(
    parts: Sequence[tuple[int, np.ndarray]], device: torch.device | str, window: int
) -> Packing:
    """Return the packing without the keys that no query of a sequence attends to."""
    return pack(
        [(length, keys[first_key(len(keys), length, window) :]) for length, keys in parts], device
    )


def _divide(
    parts: Sequence[tuple[int, np.ndarray]], device: torch.device | str, max_keys: int
) -> list[tuple[slice, Packing]]:
    """Return adjacent sequences with at most `max_keys` keys together, or one with more."""
    groups: list[list[tuple[int, np.ndarray]]] = []
    num_keys = 0
    for part in parts:
        if not groups or num_keys + len(part[1]) > max_keys:
            groups.append([])
            num_keys = 0
        groups[-1].append(part)
        num_keys += len(part[1])
    divided: list[tuple[slice, Packing]] = []
    first = 0
    for group in groups:
        end = first + sum(length for length, _ in group)
        divided.append((slice(first, end), pack(group, device)))
        first = end
    return divided


def _blocks(
    parts: Sequence[tuple[int, np.ndarray]], device: torch.device | str, window: int | None
) -> list[PairBlock]:
    """Return the blocks of queries of a packed row, with the keys that each may attend to."""
    blocks: list[PairBlock] = []
    first = 0  # First query of the sequence.
    hidden_of = cache(partial(_hidden, window, device))  # Most blocks have the same pattern.
    for length, keys in parts:
        for start in range(0, length, CHUNK_TOKENS):
            end = min(start + CHUNK_TOKENS, length)
            queries = slice(first + start, first + end)
            last = len(keys) - length + end
            seen = keys[first_key(last, end - start, window) : last]
            hidden = hidden_of(end - start, len(seen))
            blocks.append(
                PairBlock(queries, _rows(seen, device), len(seen) - hidden.shape[1], hidden)
            )
        first += length
    return blocks


def first_key(end: int, num_queries: int, window: int | None) -> int:
    """Return the first key that any of the queries before `end` attends to."""
    return 0 if window is None else max(0, end - num_queries - window + 1)


def _rows(keys: np.ndarray, device: torch.device | str) -> slice | Tensor:
    """Return the rows of keys as a slice if they are consecutive, else as indices."""
    if keys[-1] - keys[0] == len(keys) - 1:
        return slice(int(keys[0]), int(keys[-1]) + 1)
    return torch.from_numpy(keys).to(device)


def _hidden(
    window: int | None, device: torch.device | str, num_queries: int, num_keys: int
) -> Tensor:
    """Return 0 or -inf for a query and a key, [query, key]; omit the keys that all queries see."""
    if window is None or window >= num_keys:
        return torch.full((num_queries, num_queries), -torch.inf, device=device).triu(1)
    seen = window_mask(num_queries, num_keys, window, device)
    return torch.zeros(seen.shape, device=device).masked_fill_(~seen, -torch.inf)


def window_mask(num_queries: int, num_keys: int, window: int, device: torch.device | str) -> Tensor:
    """Return whether a query attends to a key, [query, key] bool.

    The last query is the last key. A query attends to its own key and to the `window` - 1 keys
    before it.
    """
    pairs = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    first = num_keys - num_queries  # Key of the first query.
    return pairs.tril(first) & pairs.triu(first - window + 1)


@dataclass(frozen=True, slots=True)
class Routes:
    """The recorded experts of a block's positions."""

    ids: Tensor = field(repr=False)  # [batch * seq, layer, chosen] uint8 or int16
    mask: Tensor = field(repr=False)  # [batch * seq] bool, True on positions with a record


def recorded_of(trajectories: Sequence[Trajectory]) -> list[Recorded | None] | None:
    """Return the records of trajectories; None if there are none at all."""
    if not any(t.expert_mask.size for t in trajectories):
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
    first = next(record for record in recorded if record is not None)
    ids = np.zeros((num_rows, *first[0].shape[1:]), dtype=first[0].dtype)
    mask = np.zeros(num_rows, dtype=bool)
    for record, of_sequence in zip(recorded, rows, strict=True):
        if record is not None:
            chosen, is_recorded = record
            places = of_sequence[is_recorded]
            again = mask[places]
            if not np.array_equal(ids[places[again]], chosen[is_recorded][again]):
                raise ValueError("sequences with unlike records of experts share tokens")
            ids[places] = chosen[is_recorded]
            mask[places] = True
    return Routes(**placed({"ids": ids, "mask": mask}, device))
