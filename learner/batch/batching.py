"""Trajectories -> rows -> minibatches -> microbatches of tensors that fit a token budget.

An episode is a row for each segment. It counts once, regardless of its number of segments: in its
group, in counts, and in means over its tokens.

In the packed layout sequences follow one another in a single row. The attention separates them, and
positions restart with each sequence. Sequences with equal first tokens form a tree, whose tokens
are computed once: a token attends to its ancestors, and its position is its depth. The gradients of
all sequences are added at their common tokens.

In the padded layout sequences of similar lengths form one [batch, seq] block with padding on the
right. A causal model needs no mask for this padding: it follows every real token, so no real token
attends to it, and no scored token is predicted from it.

Several ranks can divide a packed row: each computes adjacent tokens of it. All parts have the same
number of positions. The last ones may end with filling beyond the row.
"""
# torch's type stubs lack numpy's element types:
# pyright: reportUnknownMemberType=false

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from common.config.algorithm import RowCredit
from common.segments import joined, prefixes_of, segments_of, split_end
from common.text import counted
from common.wire.messages import Trajectory
from learner.batch.packing import (
    Packing,
    Recorded,
    Routes,
    cut,
    forest_of,
    pack,
    packed_rows,
    padded_width,
    place_routes,
    placed,
    recorded_of,
)

# Columns of samples that only a critic or a teacher fills.
_OPTIONAL_ARRAYS = ("value_targets", "values", "state_marks", "teacher_logprobs", "teacher_top")
PADDING_ID = 0  # Any valid token id: its outputs are never read.


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A trajectory to train on, or a segment of it (`rows_of`), with its advantage."""

    trajectory: Trajectory
    advantage: float  # Advantage of the episode, for every sampled token.
    # [num_turns] float32, added to the tokens of each turn
    turn_advantages: np.ndarray | None = None
    own_advantages: np.ndarray | None = None  # [tokens] float32, replaces the two above
    value_targets: np.ndarray | None = None  # [tokens] float32, targets of the critic
    values: np.ndarray | None = None  # [tokens] float32, the critic's values before the step
    state_marks: np.ndarray | None = None  # [tokens] float32, 1 on tokens that train the critic
    teacher_logprobs: np.ndarray | None = None  # [tokens] float32 nats of the teacher
    teacher_ids: np.ndarray | None = None  # [tokens, k] int32, the teacher's most probable tokens
    teacher_top: np.ndarray | None = None  # [tokens, k] float32 nats of the teacher at these
    row: int = 0  # Row number within the episode, whose rows are adjacent.
    # The prompt after the last turn of the episode, if it is a segment of its own, on the last row.
    end: Trajectory | None = None
    # Sampled tokens in all rows of the episode; 0: this row is the only one.
    num_episode_tokens: int = 0

    def token_advantages(self) -> np.ndarray:
        """Return the advantage [tokens] float32 of every sampled token."""
        if self.own_advantages is not None:
            return self.own_advantages
        turns = self.trajectory.turn_ids[self.trajectory.loss_mask]  # [tokens]
        whole = np.full(len(turns), self.advantage, dtype=np.float32)
        return whole if self.turn_advantages is None else whole + self.turn_advantages[turns]

    @property
    def num_sampled_tokens(self) -> int:
        return int(self.trajectory.loss_mask.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """The input of a forward pass: sequences, and the indices of the tokens to score.

    In the packed layout the batch is a single row of consecutive sequences. A token that several
    sequences score after the same tokens is scored once.
    """

    token_ids: Tensor = field(repr=False)  # [batch, seq] int64, padded on the right
    # [scored] int64 into [batch * seq]: the position that predicts each target
    source_rows: Tensor = field(repr=False)
    target_ids: Tensor = field(repr=False)  # [scored] int64, tokens to score
    # [tokens] int64 into [scored]: the tokens to score, sequence by sequence; None: all in order.
    scored_at: Tensor | None = field(repr=False, default=None)
    # [sequence] int64 into [batch * seq]: the last token of each
    last_rows: Tensor = field(repr=False)
    position_ids: Tensor | None = field(repr=False, default=None)  # [1, seq] int64; None if padded
    packing: Packing | None = None
    routes: Routes | None = None  # Recorded experts; None: the routers choose.
    # [batch * seq] bool, False on padding and filling; None: not known.
    is_real: Tensor | None = field(repr=False, default=None)
    # `source_rows` and `last_rows` in host memory: a read of the tensors would wait for the device.
    host_rows: tuple[np.ndarray, np.ndarray] | None = field(repr=False, default=None)
    # Ranks that hold the slices of the row; None: this batch is whole.
    sequence_group: ProcessGroup | None = None
    # [scored, k] int64, further tokens to score at each scored position; None: none.
    support_ids: Tensor | None = field(repr=False, default=None)
    num_computed: int = 0  # Positions with a token, without padding and filling.

    def per_token(self, scored: Tensor | None) -> Tensor | None:
        """Return results [tokens, ...] of all tokens from those [scored, ...]; None for None."""
        if scored is None or self.scored_at is None:
            return scored
        return scored.index_select(0, self.scored_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The input of one forward and backward pass. `tokens` are the sampled tokens only."""

    tokens: TokenBatch
    sample_indices: list[int]  # Indices of its samples in the step's list, in token order.
    sample_sizes: list[int]  # Number of sampled tokens in each sample.
    num_tokens: int  # Number of tokens of all sequences, sampled or not, without padding.
    num_turns: int  # Upper bound of `turn_ids`; some turns may have no sampled token.
    sampler_logprobs: Tensor = field(repr=False)  # [tokens] float32 nats
    advantages: Tensor = field(repr=False)  # [tokens] float32
    # [tokens] int64, version of the policy that sampled each token
    versions: Tensor = field(repr=False)
    sequence_ids: Tensor = field(repr=False)  # [tokens] int64, 0-based sequence of each token
    turn_ids: Tensor = field(repr=False)  # [tokens] int64, 0-based, numbered on across sequences
    value_targets: Tensor | None = field(repr=False, default=None)  # [tokens] float32
    values: Tensor | None = field(repr=False, default=None)  # [tokens] float32, before the step
    state_marks: Tensor | None = field(repr=False, default=None)  # [tokens] float32, 0 or 1
    # [sequence] float32, sampled tokens of the episode
    episode_tokens: Tensor | None = field(repr=False, default=None)
    teacher_logprobs: Tensor | None = field(repr=False, default=None)  # [tokens] float32 nats
    teacher_top: Tensor | None = field(repr=False, default=None)  # [tokens, k] float32 nats

    @property
    def num_sequences(self) -> int:
        return len(self.sample_indices)


def collate_tokens(
    sequences: Sequence[np.ndarray],
    masks: Sequence[np.ndarray],
    *,
    device: torch.device | str,
    is_packed: bool = False,
    shared: Sequence[int] = (),
    recorded: Sequence[Recorded | None] | None = None,
    support: Sequence[np.ndarray] | None = None,
) -> TokenBatch:
    """Arrange sequences in one block and index the tokens to score.

    Args:
        sequences: each [seq] integer token ids; lengths may differ.
        masks: each [seq] bool, True on tokens to score given all tokens before them.
        shared: only for packing, for each sequence the number of first tokens that it shares with
            the one before: they have equal records. Empty: no sequence shares tokens.
        recorded: recorded experts of each sequence; None: there are none.
        support: for each sequence [its tokens to score, k] further tokens to score there.

    Raises:
        ValueError: there is no sequence, one is empty, shapes differ, shared tokens differ, or a
            mask scores a first token, which has no predecessor.
    """
    if not sequences or len(sequences) != len(masks):
        raise ValueError(
            f"expected at least one sequence and one mask for each, got"
            f" {counted(len(sequences), 'sequence')} and {counted(len(masks), 'mask')}"
        )
    for index, (sequence, mask) in enumerate(zip(sequences, masks, strict=True)):
        if len(sequence) == 0 or len(sequence) != len(mask) or mask[0]:
            raise ValueError(
                f"sequence {index} has {counted(len(sequence), 'token')} and a mask of {len(mask)}."
                " Both numbers must be equal and positive. The first token must be masked, since it"
                " has no predecessor."
            )
    rows, keys, shape = packed_rows(sequences, shared) if is_packed else _padded_rows(sequences)
    flat = np.full(shape[0] * shape[1], PADDING_ID, dtype=np.int64)  # [batch * seq]
    positions = np.zeros_like(flat)
    is_real = np.zeros(len(flat), dtype=bool)
    for sequence, places in zip(sequences, rows, strict=True):
        flat[places], positions[places] = sequence, np.arange(len(sequence))
        is_real[places] = True
    scored = [np.flatnonzero(mask) for mask in masks]
    sources = np.concatenate([places[at - 1] for places, at in zip(rows, scored, strict=True)])
    targets = np.concatenate([places[at] for places, at in zip(rows, scored, strict=True)])
    scored_at: np.ndarray | None = None
    if support is None and any(shared):
        # Equal targets have equal sources: a position of a tree has one predecessor.
        distinct, firsts, at = np.unique(targets, return_index=True, return_inverse=True)
        if len(distinct) < len(targets):
            sources, targets, scored_at = sources[firsts], distinct, at

    arrays = {
        "token_ids": flat.reshape(shape),
        "source_rows": sources,
        "target_ids": flat[targets],
        "is_real": is_real,
        "last_rows": np.concatenate([places[-1:] for places in rows]),
    }
    if is_packed:
        arrays["position_ids"] = positions[None]
    if scored_at is not None:
        arrays["scored_at"] = scored_at
    if support is not None:
        arrays["support_ids"] = np.concatenate(support).astype(np.int64)
    packing = pack(keys, device) if is_packed else None
    routes = None if recorded is None else place_routes(recorded, rows, len(flat), device)
    host_rows = (arrays["source_rows"], arrays["last_rows"])
    moved: dict[str, Any] = dict(placed(arrays, device))
    return TokenBatch(
        **moved,
        packing=packing,
        routes=routes,
        host_rows=host_rows,
        num_computed=int(is_real.sum()),
    )


def _padded_rows(
    sequences: Sequence[np.ndarray],
) -> tuple[list[np.ndarray], list[tuple[int, np.ndarray]], tuple[int, int]]:
    """Return the positions of each sequence in a padded block, no shared rows, and its shape."""
    width = padded_width(max(map(len, sequences)))
    rows = [n * width + np.arange(len(sequence)) for n, sequence in enumerate(sequences)]
    return rows, [], (len(sequences), width)


def make_minibatches(
    samples: Sequence[Sample], num_minibatches: int, *, generator: torch.Generator
) -> list[list[int]]:
    """Distribute the samples over minibatches of whole groups, in random order from `generator`.

    With fewer groups than minibatches, whole trajectories with all their rows are distributed
    instead. With fewer trajectories than minibatches, there is one minibatch for each trajectory.

    Returns:
        Indices into `samples`; every index is in exactly one minibatch, none is empty.

    Raises:
        ValueError: there is nothing to train on.
    """
    if not samples:
        raise ValueError("the batch has no samples to train on")
    units: dict[str | int, list[int]] = {}
    for index, sample in enumerate(samples):
        units.setdefault(sample.trajectory.group_id, []).append(index)
    if len(units) < num_minibatches:
        units = {}
        for index, number in enumerate(np.cumsum([sample.row == 0 for sample in samples])):
            units.setdefault(int(number), []).append(index)
    dealt = list(units.values())
    order = [int(index) for index in torch.randperm(len(dealt), generator=generator)]
    num_parts = min(num_minibatches, len(dealt))
    return [
        [i for unit in order[part::num_parts] for i in dealt[unit]] for part in range(num_parts)
    ]


def plan_microbatches(
    lengths: Sequence[int], *, max_tokens: int, is_packed: bool = False
) -> list[list[int]]:
    """Return the sequences of each block of at most `max_tokens` entries, padding included.

    The longest sequences come first. In the padded layout neighbours then have similar lengths and
    need little padding. In the packed layout each sequence goes to the first block with room for
    it, and short ones fill the gaps. A sequence longer than the budget has its own block: it must
    be trained, too.

    Args:
        lengths: tokens of each sequence.

    Returns:
        Indices into `lengths`; every index is in exactly one block.
    """
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    blocks: list[list[int]] = []
    if is_packed:
        sizes: list[int] = []  # Tokens in each block.
        for index in longest_first:
            length = lengths[index]
            fitting = (i for i, size in enumerate(sizes) if size + length <= max_tokens)
            block = next(fitting, len(blocks))
            if block == len(blocks):
                blocks.append([])
                sizes.append(0)
            blocks[block].append(index)
            sizes[block] += length
        return blocks
    for index in longest_first:
        # The first sequence of a block is its longest.
        width = padded_width(lengths[blocks[-1][0]]) if blocks else 0
        if blocks and width * (len(blocks[-1]) + 1) <= max_tokens:
            blocks[-1].append(index)
        else:
            blocks.append([index])
    return blocks


@dataclass(frozen=True, slots=True)
class MicrobatchSamples:
    """The samples of one microbatch, in order."""

    indices: list[int]
    shared: tuple[int, ...] = ()  # As in `collate_tokens`.


def plan_blocks(
    samples: Sequence[Sample],
    indices: Sequence[int],
    *,
    max_tokens: int,
    is_packed: bool = False,
    shares_prefix: bool = False,
) -> list[MicrobatchSamples]:
    """Return the samples at `indices` in blocks of at most `max_tokens`, padding included.

    Samples of a tree are adjacent. A tree with more tokens is cut where it costs least.
    """
    lengths = [len(samples[index].trajectory.token_ids) for index in indices]
    if not (is_packed and shares_prefix):
        planned = plan_microbatches(lengths, max_tokens=max_tokens, is_packed=is_packed)
        return [MicrobatchSamples([indices[i] for i in block]) for block in planned]
    pieces = plan_trees(samples, indices, max_tokens=max_tokens)
    totals = [piece.num_tokens for piece in pieces]
    return [
        MicrobatchSamples(
            [index for i in block for index in pieces[i].indices],
            tuple(num for i in block for num in pieces[i].shared),
        )
        for block in plan_microbatches(totals, max_tokens=max_tokens, is_packed=True)
    ]


@dataclass(frozen=True, slots=True)
class TreePiece:
    """The samples of a tree, or of a part of one."""

    indices: list[int]
    lengths: list[int]  # Tokens of each sample.
    shared: list[int]  # As in `collate_tokens`.

    @property
    def num_tokens(self) -> int:
        """The number of tokens to compute."""
        return sum(self.lengths) - sum(self.shared)

    @property
    def num_pairs(self) -> int:
        """The number of pairs of a query and a key."""
        repeated = sum(num * (num + 1) // 2 for num in self.shared)
        return sum(num * (num + 1) // 2 for num in self.lengths) - repeated


def plan_trees(
    samples: Sequence[Sample], indices: Sequence[int], *, max_tokens: int
) -> list[TreePiece]:
    """Return the trees of the samples at `indices`, cut into pieces of at most `max_tokens`."""
    rows = [samples[index].trajectory for index in indices]
    forest = forest_of(rows)
    lengths = [len(rows[at].token_ids) for at in forest.order]
    return [
        TreePiece(
            [indices[forest.order[at]] for at in piece],
            [lengths[at] for at in piece],
            [forest.shared[at] if at > piece.start else 0 for at in piece],
        )
        for piece in cut(lengths, forest.shared, max_tokens=max_tokens)
    ]


def each_microbatch(
    samples: Sequence[Sample],
    indices: Sequence[int],
    *,
    max_tokens: int,
    device: torch.device | str,
    is_packed: bool = False,
    shares_prefix: bool = False,
) -> Iterator[MicroBatch]:
    """Yield the samples at `indices` as blocks of at most `max_tokens`, padding included.

    A device computes one block while the next is made.
    """
    for block in plan_blocks(
        samples, indices, max_tokens=max_tokens, is_packed=is_packed, shares_prefix=shares_prefix
    ):
        yield _collate(samples, block, device, is_packed)


def _collate(
    samples: Sequence[Sample], block: MicrobatchSamples, device: torch.device | str, is_packed: bool
) -> MicroBatch:
    """Return the tensors of one microbatch."""
    chosen = [samples[index] for index in block.indices]
    trajectories = [sample.trajectory for sample in chosen]
    masks = [t.loss_mask for t in trajectories]
    counts = [sample.num_sampled_tokens for sample in chosen]
    wholes = [s.num_episode_tokens or count for s, count in zip(chosen, counts, strict=True)]
    # First turn number of each sequence, and the number of turns.
    *firsts, num_turns = np.cumsum([0, *(t.num_turns for t in trajectories)])
    turns = [
        t.turn_ids[mask] + first for t, mask, first in zip(trajectories, masks, firsts, strict=True)
    ]
    arrays: dict[str, np.ndarray] = {
        "sampler_logprobs": sampled(trajectories, [t.logprobs for t in trajectories], np.float32),
        "advantages": np.concatenate([sample.token_advantages() for sample in chosen]),
        "versions": sampled(trajectories, [t.versions for t in trajectories], np.int64),
        "sequence_ids": np.repeat(np.arange(len(chosen)), counts),
        "turn_ids": np.concatenate(turns),
        "episode_tokens": np.array(wholes, dtype=np.float32),
    }
    for name in _OPTIONAL_ARRAYS:
        parts = [getattr(sample, name) for sample in chosen]
        if all(part is not None for part in parts):
            arrays[name] = np.concatenate(parts).astype(np.float32)
    support = [sample.teacher_ids for sample in chosen if sample.teacher_ids is not None]
    tokens = collate_tokens(
        [t.token_ids for t in trajectories],
        masks,
        device=device,
        is_packed=is_packed,
        shared=block.shared,
        recorded=recorded_of(trajectories),
        support=support if len(support) == len(chosen) else None,
    )
    return MicroBatch(
        tokens=tokens,
        sample_indices=block.indices,
        sample_sizes=counts,
        num_tokens=sum(len(t.token_ids) for t in trajectories),
        num_turns=int(num_turns),
        **placed(arrays, device),
    )


def sampled(
    trajectories: Sequence[Trajectory], arrays: Sequence[np.ndarray], dtype: Any = None
) -> np.ndarray:
    """Return the entries of per-token arrays at the sampled tokens, concatenated.

    Args:
        dtype: dtype of the result; None: that of the arrays.
    """
    whole = np.concatenate([a[t.loss_mask] for t, a in zip(trajectories, arrays, strict=True)])
    return whole.astype(dtype, copy=False) if dtype else whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The order of entries that several ranks have computed."""

    most: int  # Number of entries of the rank with most, at least 1.
    # [entry] int64 into [rank * most]: the entries of each rank, filled to `most`
    at: Tensor = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPart:
    """The part of a packed row that one rank computes."""

    tokens: TokenBatch  # The positions of the part, with the packing of the whole row.
    scored: Places  # Order of the scored tokens in the whole row.
    ends: Places  # Order of the sequences' last tokens.


def row_part(tokens: TokenBatch, group: ProcessGroup) -> RowPart:
    """Return this rank's part of a packed row.

    Args:
        group: the ranks that compute the parts, in their order.
    """
    num_parts = group.size()
    index = group.rank()
    assert tokens.host_rows is not None
    assert tokens.position_ids is not None
    width = -(-tokens.token_ids.shape[1] // num_parts)  # Positions of each part.
    first = index * width
    arrays: dict[str, np.ndarray] = {}
    most: dict[str, int] = {}
    for name, rows in zip(("scored", "ends"), tokens.host_rows, strict=True):
        owners = rows // width
        of_part = np.flatnonzero(owners == index)
        arrays[f"{name}_own"] = of_part
        arrays[f"{name}_rows"] = rows[of_part] - first
        arrays[name], most[name] = _places(owners, num_parts)
    moved = placed(arrays, tokens.token_ids.device)

    def cut(column: Tensor, filling: int = 0) -> Tensor:
        """Return the entries of this part, of a column [position, ...]."""
        part = column[first : first + width]
        sides = (0, 0) * (part.ndim - 1) + (0, width - len(part))
        return F.pad(part, sides, value=filling) if len(part) < width else part

    routes = tokens.routes
    support = tokens.support_ids
    part = TokenBatch(
        token_ids=cut(tokens.token_ids[0], PADDING_ID)[None],
        source_rows=moved["scored_rows"],
        target_ids=tokens.target_ids[moved["scored_own"]],
        last_rows=moved["ends_rows"],
        position_ids=cut(tokens.position_ids[0])[None],
        packing=tokens.packing,
        routes=None if routes is None else Routes(cut(routes.ids), cut(routes.mask)),
        sequence_group=group,
        support_ids=None if support is None else support[moved["scored_own"]],
    )
    places = {name: Places(most=most[name], at=moved[name]) for name in most}
    return RowPart(tokens=part, **places)


def _places(owners: np.ndarray, num_parts: int) -> tuple[np.ndarray, int]:
    """Return the place of each entry among those of all parts, and the largest number of a part.

    Args:
        owners: [entry] int64, the part that has the entry. A part keeps its entries in order.
    """
    counts = np.bincount(owners, minlength=num_parts)
    most = max(1, int(counts.max()))
    places = np.empty(len(owners), dtype=np.int64)
    by_owner = np.argsort(owners, kind="stable")
    starts = np.cumsum(counts) - counts  # First entry of each part in that order.
    ordered = owners[by_owner]
    places[by_owner] = ordered * most + np.arange(len(owners)) - starts[ordered]
    return places, most


BySample = dict[int, Tensor]  # Entries of each sample by its index, without gradient.
OF_TEACHER = ("teacher_logprobs", "teacher_ids", "teacher_top")
_PER_TOKEN = ("own_advantages", "value_targets", "values", "state_marks", *OF_TEACHER)


def rows_of(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples of all segments in order; those of an episode are adjacent.

    A segment without a sampled token trains nothing and is omitted. The prompt after the last turn
    is the `end` of the episode's last row.
    """
    return [row for sample in samples for row in _rows(sample)]


def _rows(sample: Sample) -> list[Sample]:
    """Return a sample as one sample for each of its segments with sampled tokens."""
    parts, end = split_end(sample.trajectory)
    if len(parts) == 1 and end is None:
        return [sample]
    counts = [int(part.loss_mask.sum()) for part in parts]
    cuts = np.cumsum(counts)[:-1]
    columns: dict[str, list[np.ndarray]] = {}
    for name in _PER_TOKEN:
        if (column := getattr(sample, name)) is not None:
            columns[name] = np.split(column, cuts)
    sampled = [number for number, count in enumerate(counts) if count]
    return [
        replace(
            sample,
            trajectory=parts[number],
            row=row,
            end=end if number == sampled[-1] else None,
            num_episode_tokens=sum(counts),
            **{name: column[number] for name, column in columns.items()},
        )
        for row, number in enumerate(sampled)
    ]


def with_row_credit(sample: Sample, credit: RowCredit) -> Sample:
    """Return an episode's sample with the advantages of its rows.

    Args:
        credit: `share` multiplies the advantage of a row's tokens by the row's share of the
            episode's sampled tokens, `root` by 1 or 0.
    """
    trajectory = sample.trajectory
    parts = segments_of(trajectory)
    if credit is RowCredit.ALL or len(parts) == 1:
        return sample
    counts = np.array([trajectory.loss_mask[part].sum() for part in parts])
    if credit is RowCredit.SHARE:
        weights = counts / max(1, counts.sum())
    else:
        weights = np.array(_of_root(trajectory))
    factors = np.repeat(weights.astype(np.float32), counts)  # [tokens]
    return replace(sample, own_advantages=sample.token_advantages() * factors)


def _of_root(trajectory: Trajectory) -> list[bool]:
    """Return whether each row continues an answer of the first conversation, [row]."""
    sampled: list[np.ndarray] = []  # [row][seq] whether a token is sampled, also in a prefix.
    of_root: list[bool] = []
    for part, (earlier, num) in zip(segments_of(trajectory), prefixes_of(trajectory), strict=True):
        before = sampled[earlier][:num] if num else np.zeros(0, dtype=np.bool_)
        of_root.append(not of_root or (of_root[earlier] and bool(before.any())))
        sampled.append(np.concatenate([before, trajectory.loss_mask[part]]))
    return of_root


def episodes_of(rows: Sequence[Sample]) -> list[Sample]:
    """Return the episodes of the rows; the rows must not have a critic's columns yet."""
    members: list[list[Sample]] = []
    for sample in rows:
        if sample.row == 0:
            members.append([])
        members[-1].append(sample)
    return [
        replace(
            rows[0],
            trajectory=joined([*(row.trajectory for row in rows), *([end] if end else [])]),
            end=None,
            num_episode_tokens=0,
            **_teacher_columns(rows),
        )
        for rows, end in ((rows, rows[-1].end) for rows in members)
    ]


def with_ends(samples: Sequence[Sample]) -> tuple[list[Sample], dict[int, int]]:
    """Return the rows followed by the ends of episodes as rows, and the place of each row's end.

    The value of an episode's end is read at the last token of the returned place. The returned
    rows have no ends of their own, so that they stay the same when they are passed again.
    """
    ends = {n: sample.end for n, sample in enumerate(samples) if sample.end is not None}
    rows = [replace(sample, end=None) for sample in samples]
    places: dict[int, int] = {}
    for index, end in ends.items():
        places[index] = len(rows)
        rows.append(Sample(trajectory=end, advantage=0.0))
    return rows, places


def _teacher_columns(rows: Sequence[Sample]) -> dict[str, np.ndarray]:
    """Return the teacher's columns of an episode's rows, joined."""
    return {
        name: np.concatenate([getattr(row, name) for row in rows])
        for name in OF_TEACHER
        if getattr(rows[0], name) is not None
    }


def by_sample(micro: MicroBatch, flat: Tensor) -> BySample:
    """Split a block's entries [tokens] by sample, without gradient."""
    parts = torch.split(flat.detach(), micro.sample_sizes)
    return dict(zip(micro.sample_indices, parts, strict=True))


def in_order(parts: BySample, indices: Sequence[int]) -> Tensor:
    """Return tensors of samples concatenated in the order of the indices."""
    return torch.cat([parts[index] for index in indices])


def with_advantage(samples: Sequence[Sample], part: Sequence[int]) -> Sequence[int]:
    """Return the indices of `part` with a nonzero advantage; all indices if there are none."""
    return [index for index in part if samples[index].token_advantages().any()] or part
