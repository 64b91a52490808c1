"""Trajectories -> minibatches -> microbatches of tensors that fit a token budget.

Packed, sequences follow one another in a single row; the attention keeps them apart, and positions
begin again with each. Padded, those of similar length are filled up on the right to one
[batch, seq] block. A causal model needs no mask for that: padding comes after every real token, so
no real token ever sees it, and nothing is predicted from it.
"""
# torch's type stubs know nothing of numpy's element types:
# pyright: reportUnknownMemberType=false

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from common.wire.messages import Trajectory

PADDING_ID = 0  # any valid id: its outputs are never read


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One trajectory that trains, and its advantage."""

    trajectory: Trajectory
    advantage: float  # of the episode, on every sampled token
    turn_advantages: np.ndarray | None = None  # [num_turns] float32, added on a turn's tokens
    own_advantages: np.ndarray | None = None  # [tokens] float32, instead of the two above
    value_targets: np.ndarray | None = None  # [tokens] float32, of the critic
    values: np.ndarray | None = None  # [tokens] float32, the critic's before the step
    state_marks: np.ndarray | None = None  # [tokens] float32, 1 where the critic is to learn

    def token_advantages(self) -> np.ndarray:
        """Return the advantage [tokens] float32 of every sampled token."""
        if self.own_advantages is not None:
            return self.own_advantages
        turns = self.trajectory.turn_ids[self.trajectory.loss_mask]  # [tokens]
        own = np.full(len(turns), self.advantage, dtype=np.float32)
        return own if self.turn_advantages is None else own + self.turn_advantages[turns]

    @property
    def num_sampled_tokens(self) -> int:
        return int(self.trajectory.loss_mask.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """What a forward pass needs: sequences and which of their tokens are scored.

    Packed, the batch is a single row in which they follow one another.
    """

    token_ids: Tensor = field(repr=False)  # [batch, seq] int64, padded on the right
    source_rows: Tensor = field(repr=False)  # [tokens] int64, into [batch * seq]: predicts target
    target_ids: Tensor = field(repr=False)  # [tokens] int64, scored tokens, sequence by sequence
    last_rows: Tensor = field(repr=False)  # [sequence] int64, into [batch * seq]: where each ends
    lengths: tuple[int, ...]  # of each sequence
    position_ids: Tensor | None = field(repr=False, default=None)  # [1, seq] int64; None if padded
    bounds: Tensor | None = field(repr=False, default=None)  # [sequence + 1] int32; None if padded


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What one forward and backward pass trains on. `tokens` are the sampled tokens only."""

    tokens: TokenBatch
    sample_indices: list[int]  # where its samples stand in the step's list, in token order
    sample_sizes: list[int]  # sampled tokens of each
    num_tokens: int  # real ones, sampled or not, without padding
    sampler_logprobs: Tensor = field(repr=False)  # [tokens] float32 nats
    advantages: Tensor = field(repr=False)  # [tokens] float32
    versions: Tensor = field(repr=False)  # [tokens] int64, of the policy that sampled
    sequence_ids: Tensor = field(repr=False)  # [tokens] int64, 0-based sequence of each token
    value_targets: Tensor | None = field(repr=False, default=None)  # [tokens] float32
    values: Tensor | None = field(repr=False, default=None)  # [tokens] float32, before the step
    state_marks: Tensor | None = field(repr=False, default=None)  # [tokens] float32, 0 or 1

    @property
    def num_sequences(self) -> int:
        return len(self.sample_indices)


def collate_tokens(
    sequences: Sequence[np.ndarray],
    masks: Sequence[np.ndarray],
    *,
    device: torch.device | str,
    is_packed: bool = False,
) -> TokenBatch:
    """Lay sequences into one block and index the tokens to score.

    Args:
        sequences: each [seq] integer token ids; lengths may differ.
        masks: each [seq] bool, True on tokens to score given all tokens before them.

    Raises:
        ValueError: no sequence, an empty one, shapes that differ, or a first token to score,
            which nothing predicts.
    """
    if not sequences or len(sequences) != len(masks):
        raise ValueError(f"need as many sequences as masks: {len(sequences)}, {len(masks)}")
    for index, (sequence, mask) in enumerate(zip(sequences, masks, strict=True)):
        if len(sequence) == 0 or len(sequence) != len(mask) or mask[0]:
            raise ValueError(
                f"sequence {index}: {len(sequence)} tokens, {len(mask)} mask entries; both must "
                "agree, and the first token has no predecessor, so it cannot be scored"
            )
    lengths = np.array([len(sequence) for sequence in sequences])
    bounds = np.concatenate([[0], np.cumsum(lengths)])  # [sequence + 1]
    width, height = (int(bounds[-1]), 1) if is_packed else (int(lengths.max()), len(sequences))
    starts = bounds[:-1] if is_packed else np.arange(len(sequences)) * width  # [sequence]
    flat = np.full(height * width, PADDING_ID, dtype=np.int64)  # [batch * seq]
    for start, sequence in zip(starts, sequences, strict=True):
        flat[start : start + len(sequence)] = sequence
    scored = [start + np.flatnonzero(mask) for start, mask in zip(starts, masks, strict=True)]
    targets = np.concatenate(scored)  # [tokens]

    def placed(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    positions = np.arange(width) - np.repeat(bounds[:-1], lengths) if is_packed else None
    return TokenBatch(
        token_ids=placed(flat.reshape(height, width)),
        source_rows=placed(targets - 1),
        target_ids=placed(flat[targets]),
        last_rows=placed(starts + lengths - 1),
        lengths=tuple(lengths.tolist()),
        position_ids=None if positions is None else placed(positions[None]),
        bounds=placed(bounds.astype(np.int32)) if is_packed else None,
    )


def make_minibatches(
    samples: Sequence[Sample], num_minibatches: int, *, generator: torch.Generator
) -> list[list[int]]:
    """Deal the samples into minibatches of whole groups, in an order drawn from `generator`.

    With fewer groups than minibatches, trajectories are dealt instead; with fewer trajectories
    than minibatches, there are only as many minibatches as trajectories.

    Returns:
        Indices into `samples`; every index is in exactly one minibatch, none is empty.

    Raises:
        ValueError: there is nothing to train on.
    """
    if not samples:
        raise ValueError("there are no samples to train on")
    units: dict[str | int, list[int]] = {}
    for index, sample in enumerate(samples):
        units.setdefault(sample.trajectory.group_id, []).append(index)
    if len(units) < num_minibatches:
        units = {index: [index] for index in range(len(samples))}
    dealt = list(units.values())
    order = [int(index) for index in torch.randperm(len(dealt), generator=generator)]
    num_parts = min(num_minibatches, len(dealt))
    return [
        [i for unit in order[part::num_parts] for i in dealt[unit]] for part in range(num_parts)
    ]


def plan_microbatches(
    lengths: Sequence[int], *, max_tokens: int, is_packed: bool = False
) -> list[list[int]]:
    """Return which sequences share a block of at most `max_tokens` entries, padding included.

    Longest first: padded, neighbours have similar lengths and little is padded; packed, each goes
    to the first block with room for it, and the short ones fill the gaps. A sequence longer than
    the budget gets a block of its own: it must be trained on all the same.

    Args:
        lengths: tokens of each sequence.

    Returns:
        Indices into `lengths`; every index is in exactly one block.
    """
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    blocks: list[list[int]] = []
    if is_packed:
        sizes: list[int] = []  # of each block
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
        width = lengths[blocks[-1][0]] if blocks else 0  # the first of a block is its longest
        if blocks and width * (len(blocks[-1]) + 1) <= max_tokens:
            blocks[-1].append(index)
        else:
            blocks.append([index])
    return blocks


def make_microbatches(
    samples: Sequence[Sample],
    indices: Sequence[int],
    *,
    max_tokens: int,
    device: torch.device | str,
    is_packed: bool = False,
) -> list[MicroBatch]:
    """Return the samples at `indices` as blocks of at most `max_tokens`, padding included."""
    lengths = [len(samples[index].trajectory.token_ids) for index in indices]
    blocks = plan_microbatches(lengths, max_tokens=max_tokens, is_packed=is_packed)
    return [_collate(samples, [indices[i] for i in block], device, is_packed) for block in blocks]


def _collate(
    samples: Sequence[Sample], indices: list[int], device: torch.device | str, is_packed: bool
) -> MicroBatch:
    chosen = [samples[index] for index in indices]
    trajectories = [sample.trajectory for sample in chosen]
    masks = [t.loss_mask for t in trajectories]
    logprobs = sampled(trajectories, [t.logprobs for t in trajectories])
    advantages = np.concatenate([sample.token_advantages() for sample in chosen])
    versions = sampled(trajectories, [t.versions for t in trajectories]).astype(np.int64)
    counts = [sample.num_sampled_tokens for sample in chosen]
    return MicroBatch(
        tokens=collate_tokens(
            [t.token_ids for t in trajectories], masks, device=device, is_packed=is_packed
        ),
        sample_indices=indices,
        sample_sizes=counts,
        num_tokens=sum(len(t.token_ids) for t in trajectories),
        sampler_logprobs=torch.from_numpy(logprobs.astype(np.float32)).to(device),
        advantages=torch.from_numpy(advantages).to(device),
        versions=torch.from_numpy(versions).to(device),
        sequence_ids=torch.from_numpy(np.repeat(np.arange(len(chosen)), counts)).to(device),
        value_targets=_joined([sample.value_targets for sample in chosen], device),
        values=_joined([sample.values for sample in chosen], device),
        state_marks=_joined([sample.state_marks for sample in chosen], device),
    )


def _joined(parts: list[np.ndarray | None], device: torch.device | str) -> Tensor | None:
    """Return [tokens] of all samples, None if there is no critic."""
    present = [part for part in parts if part is not None]
    if len(present) < len(parts):
        return None
    return torch.from_numpy(np.concatenate(present).astype(np.float32)).to(device)


def sampled(trajectories: Sequence[Trajectory], arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return the entries of per-token arrays that belong to sampled tokens, concatenated."""
    return np.concatenate([a[t.loss_mask] for t, a in zip(trajectories, arrays, strict=True)])
