"""Samples of episodes <-> samples of training rows: one per segment, with the episode's credit.

An episode counts once, whatever it was cut into: in its group, in counts, in means of its tokens.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from common.segments import as_rows, joined
from learner.batch.batching import MicroBatch, Sample

BySample = dict[int, Tensor]  # index of a sample -> its entries, without gradient
_PER_TOKEN = ("own_advantages", "value_targets", "values", "state_marks")


def rows_of(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples of all segments, those of an episode side by side, in order.

    A segment without a sampled token trains nothing and is left out.
    """
    return [row for sample in samples for row in _rows(sample)]


def _rows(sample: Sample) -> list[Sample]:
    parts = as_rows(sample.trajectory)
    if len(parts) == 1:
        return [sample]
    counts = [int(part.loss_mask.sum()) for part in parts]
    cuts = np.cumsum(counts)[:-1]
    columns: dict[str, list[np.ndarray]] = {}
    for name in _PER_TOKEN:
        if (column := getattr(sample, name)) is not None:
            columns[name] = np.split(column, cuts)
    kept = [number for number, count in enumerate(counts) if count]
    return [
        replace(
            sample,
            trajectory=parts[number],
            row=row,
            num_episode_tokens=sum(counts),
            **{name: column[number] for name, column in columns.items()},
        )
        for row, number in enumerate(kept)
    ]


def episodes_of(rows: Sequence[Sample]) -> list[Sample]:
    """Return the episodes that the rows are of; a critic has not been asked about them yet."""
    members: list[list[Sample]] = []
    for sample in rows:
        if sample.row == 0:
            members.append([])
        members[-1].append(sample)
    return [
        replace(own[0], trajectory=joined([row.trajectory for row in own]), num_episode_tokens=0)
        for own in members
    ]


def by_sample(micro: MicroBatch, flat: Tensor) -> BySample:
    """Cut a block's entries [tokens] into those of its samples, without gradient."""
    parts = flat.detach().split(micro.sample_sizes)
    return dict(zip(micro.sample_indices, parts, strict=True))


def in_order(parts: BySample, indices: Sequence[int]) -> Tensor:
    return torch.cat([parts[index] for index in indices])


def with_advantage(samples: Sequence[Sample], part: Sequence[int]) -> Sequence[int]:
    """Return the indices of `part` whose samples have an advantage; all, where none has."""
    return [index for index in part if samples[index].token_advantages().any()] or part
