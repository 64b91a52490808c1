"""Samples of episodes as training rows, one for each segment, and as bytes for other ranks.

An episode counts once, regardless of its number of segments: in its group, in counts, and in means
over its tokens.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import io
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from common.config.algorithm import RowCredit
from common.segments import joined, prefixes_of, segments_of, split_end
from common.wire.codec import pack_record, unpack_record
from common.wire.messages import Trajectory
from learner.batch.batching import MicroBatch, Sample

ABSENT = -1  # Length that encodes a missing array.
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


def pack_samples(samples: Sequence[Sample]) -> bytes:
    """Return samples as bytes: trajectory records, advantages, and the sizes to split them.

    The critic's columns are not included: each rank computes them itself.
    """
    records = [np.frombuffer(pack_record(sample.trajectory), dtype=np.uint8) for sample in samples]
    file = io.BytesIO()
    np.savez(
        file,
        records=np.concatenate(records),
        record_sizes=np.array([len(record) for record in records]),
        advantages=np.array([sample.advantage for sample in samples], dtype=np.float64),
        **_joined("turn", [sample.turn_advantages for sample in samples]),  # pyright: ignore[reportArgumentType]
        **_joined("own", [sample.own_advantages for sample in samples]),
        **{name: column for name in _OF_TEACHER if (column := _column(name, samples)) is not None},
    )
    return file.getvalue()


def unpack_samples(payload: bytes) -> list[Sample]:
    """Return the samples of `pack_samples`. Raises: WireError, ValueError."""
    with np.load(io.BytesIO(payload), allow_pickle=False) as arrays:
        records = np.split(arrays["records"], np.cumsum(arrays["record_sizes"])[:-1])
        advantages = arrays["advantages"].tolist()
        turn, token = (_split_array(arrays[f"{n}"], arrays[f"{n}_sizes"]) for n in ("turn", "own"))
        taught = {name: arrays[name] for name in _OF_TEACHER if name in arrays}
    samples: list[Sample] = []
    for record, advantage, of_turns, of_tokens in zip(
        records, advantages, turn, token, strict=True
    ):
        trajectory = unpack_record(record.tobytes())
        if not isinstance(trajectory, Trajectory):
            raise ValueError(f"expected a Trajectory, got {type(trajectory).__name__}")
        samples.append(
            Sample(
                trajectory=trajectory,
                advantage=advantage,
                turn_advantages=of_turns,
                own_advantages=of_tokens,
            )
        )
    return _with_columns(samples, taught)


def _column(name: str, samples: Sequence[Sample]) -> np.ndarray | None:
    """Return a column of all samples, [tokens] or [tokens, k]; None if a sample has none."""
    parts = [getattr(sample, name) for sample in samples]
    return None if any(part is None for part in parts) else np.concatenate(parts)


def _with_columns(samples: list[Sample], columns: dict[str, np.ndarray]) -> list[Sample]:
    """Return the samples with their parts of the columns of `_column`."""
    cuts = np.cumsum([sample.num_sampled_tokens for sample in samples])[:-1]
    for name, column in columns.items():
        parts = np.split(column, cuts)
        samples = [replace(s, **{name: part}) for s, part in zip(samples, parts, strict=True)]
    return samples


def _joined(name: str, parts: list[np.ndarray | None]) -> dict[str, np.ndarray]:
    """Return arrays as one flat array with their sizes; ABSENT marks a missing array."""
    present = [part for part in parts if part is not None]
    flat = np.concatenate([np.zeros(0, dtype=np.float32), *present])
    sizes = np.array([ABSENT if part is None else len(part) for part in parts])
    return {name: flat, f"{name}_sizes": sizes}


def _split_array(flat: np.ndarray, sizes: np.ndarray) -> list[np.ndarray | None]:
    parts = np.split(flat, np.cumsum(np.maximum(sizes, 0))[:-1])
    return [None if size == ABSENT else part for part, size in zip(parts, sizes, strict=True)]
