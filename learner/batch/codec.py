"""The samples of a step as one byte string, for the learner's other ranks. No pickle."""

import io
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from common.wire.codec import pack_record, unpack_record
from common.wire.messages import Trajectory
from learner.batch.batching import Sample

OF_TEACHER = ("teacher_logprobs", "teacher_ids", "teacher_top")
ABSENT = -1  # Length that encodes a missing array.


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
        **{name: column for name in OF_TEACHER if (column := _column(name, samples)) is not None},
    )
    return file.getvalue()


def unpack_samples(payload: bytes) -> list[Sample]:
    """Return the samples of `pack_samples`. Raises: WireError, ValueError."""
    with np.load(io.BytesIO(payload), allow_pickle=False) as arrays:
        records = np.split(arrays["records"], np.cumsum(arrays["record_sizes"])[:-1])
        advantages = arrays["advantages"].tolist()
        turn, own = (_split_array(arrays[f"{n}"], arrays[f"{n}_sizes"]) for n in ("turn", "own"))
        taught = {name: arrays[name] for name in OF_TEACHER if name in arrays}
    samples: list[Sample] = []
    for record, advantage, of_turns, of_tokens in zip(records, advantages, turn, own, strict=True):
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
