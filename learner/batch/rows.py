"""Converts samples of episodes to training rows, one for each segment, and back.

An episode counts once, regardless of its number of segments: in its group, in counts, and in means
over its tokens.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from common.segments import joined, split_end
from learner.batch.batching import MicroBatch, Sample

BySample = dict[int, Tensor]  # Entries of each sample by its index, without gradient.
_OF_TEACHER = ("teacher_logprobs", "teacher_ids", "teacher_top")
_PER_TOKEN = ("own_advantages", "value_targets", "values", "state_marks", *_OF_TEACHER)


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
    kept = [number for number, count in enumerate(counts) if count]
    return [
        replace(
            sample,
            trajectory=parts[number],
            row=row,
            end=end if number == kept[-1] else None,
            num_episode_tokens=sum(counts),
            **{name: column[number] for name, column in columns.items()},
        )
        for row, number in enumerate(kept)
    ]


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

    The value of an episode's end is read at the last token of the returned place.
    """
    ends = {index: each.end for index, each in enumerate(samples) if each.end is not None}
    rows = [*samples]
    places: dict[int, int] = {}
    for index, end in ends.items():
        places[index] = len(rows)
        rows.append(Sample(trajectory=end, advantage=0.0))
    return rows, places


def _teacher_columns(rows: Sequence[Sample]) -> dict[str, np.ndarray]:
    """Return the teacher's columns of an episode's rows, joined."""
    return {
        name: np.concatenate([getattr(row, name) for row in rows])
        for name in _OF_TEACHER
        if getattr(rows[0], name) is not None
    }


def by_sample(micro: MicroBatch, flat: Tensor) -> BySample:
    """Split a block's entries [tokens] by sample, without gradient."""
    parts = flat.detach().split(micro.sample_sizes)
    return dict(zip(micro.sample_indices, parts, strict=True))


def in_order(parts: BySample, indices: Sequence[int]) -> Tensor:
    """Return tensors of samples concatenated in the order of the indices."""
    return torch.cat([parts[index] for index in indices])


def with_advantage(samples: Sequence[Sample], part: Sequence[int]) -> Sequence[int]:
    """Return the indices of `part` with a nonzero advantage; all indices if there are none."""
    return [index for index in part if samples[index].token_advantages().any()] or part
