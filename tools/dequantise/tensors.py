"""Streams tensors from and to safetensors files; no file is ever in memory."""

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from learner.policy.model_shape import INDEX, WHOLE, weight_entries, weight_files

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
FILE_BYTES = 4 << 30  # Limit of one written file, unless a single tensor is larger.
COPY_BYTES = 16 << 20
HEADER_ALIGNMENT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTensor:
    """A tensor in a safetensors file."""

    path: Path
    offset: int  # First byte in the file.
    num_bytes: int
    dtype: str  # Name in the file's header.
    shape: tuple[int, ...]

    def read(self, first: int = 0, last: int | None = None) -> Tensor:
        """Return rows [first, last) of the first axis; a scalar is read whole.

        Raises: ValueError: the dtype is unknown, or the file is cut off.
        """
        if self.dtype not in DTYPES:
            raise ValueError(f"{self.path.name}: unknown dtype {self.dtype}")
        dtype = DTYPES[self.dtype]
        if not self.shape:
            return self._bytes(0, self.num_bytes).view(dtype).reshape(())
        last = self.shape[0] if last is None else last
        row = math.prod(self.shape[1:]) * dtype.itemsize
        raw = self._bytes(first * row, (last - first) * row)
        return raw.view(dtype).reshape(last - first, *self.shape[1:])

    def copied(self) -> Iterator[Tensor]:
        """Yield the bytes of the tensor in pieces."""
        for start in range(0, self.num_bytes, COPY_BYTES):
            yield self._bytes(start, min(COPY_BYTES, self.num_bytes - start))

    def _bytes(self, start: int, count: int) -> Tensor:
        """Return bytes of the tensor as uint8. They are read, not mapped, so memory is freed."""
        buffer = torch.empty(count, dtype=torch.uint8)
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.offset + start)
            view = _view(buffer)
            while view:
                num = file.readinto(view)
                if not num:
                    raise ValueError(f"{self.path.name}: the file is cut off")
                view = view[num:]
        return buffer


def stored_tensors(folder: Path) -> dict[str, SourceTensor]:
    """Return the tensors of a checkpoint by name, in the order of its files."""
    tensors: dict[str, SourceTensor] = {}
    for path in weight_files(folder):
        start, header = weight_entries(path)
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            tensors[name] = SourceTensor(
                path=path,
                offset=start + first,
                num_bytes=last - first,
                dtype=entry["dtype"],
                shape=tuple(entry["shape"]),
            )
    return tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A tensor of the new checkpoint, which is computed when it is written."""

    name: str
    dtype: str  # Name in a safetensors header.
    shape: tuple[int, ...]
    # Returns consecutive parts of the tensor, in this dtype or as bytes.
    parts: Callable[[], Iterable[Tensor]]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def copy_of(name: str, tensor: SourceTensor) -> Output:
    """Return a tensor that does not change."""
    return Output(name=name, dtype=tensor.dtype, shape=tensor.shape, parts=tensor.copied)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """A file of weights that was written."""

    num_bytes: int
    sha256: str  # "" for an outline.


def write_weights(
    outputs: Sequence[Output], folder: Path, *, note: Callable[[int], None] | None
) -> dict[str, WrittenFile]:
    """Write a checkpoint's tensors and their index; return the files by name.

    At most one tensor is in memory.

    Args:
        note: receives the number of bytes that have been written. None writes an outline: files
            of the right sizes, whose headers are right and whose numbers have no disk blocks.

    Raises: OSError: the disk is full. ValueError: a source is damaged.
    """
    shards = _shards(outputs)
    names = [WHOLE]
    if len(shards) > 1:
        names = [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, 1 + len(shards))]
    written: dict[str, WrittenFile] = {}
    done = 0
    for name, shard in zip(names, shards, strict=True):
        written[name] = _write_file(folder / name, shard, done, note)
        done += sum(each.num_bytes for each in shard)
    if len(shards) > 1:
        weight_map = {
            each.name: n for n, shard in zip(names, shards, strict=True) for each in shard
        }
        tree = {"metadata": {"total_size": done}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(tree, indent=2), encoding="utf-8")
    return written


def _shards(outputs: Iterable[Output]) -> list[list[Output]]:
    """Return the tensors of each file, in order, up to `FILE_BYTES`."""
    shards: list[list[Output]] = [[]]
    size = 0
    for output in outputs:
        if shards[-1] and size + output.num_bytes > FILE_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(output)
        size += output.num_bytes
    return shards


def _write_file(
    path: Path, outputs: Sequence[Output], done: int, note: Callable[[int], None] | None
) -> WrittenFile:
    # Readers need aligned numbers: wide ones come first. The order is stable otherwise.
    ordered = sorted(outputs, key=lambda each: -DTYPES[each.dtype].itemsize)
    header = _header(ordered)
    digest = hashlib.sha256(header)
    with path.open("wb") as file:
        file.write(header)
        if note is None:
            num_bytes = len(header) + sum(each.num_bytes for each in ordered)
            file.truncate(num_bytes)
            return WrittenFile(num_bytes=num_bytes, sha256="")
        for output in ordered:
            start = file.tell()
            for part in output.parts():
                content = _view(part.contiguous().reshape(-1).view(torch.uint8))
                file.write(content)
                digest.update(content)
                note(done + file.tell() - len(header))
            if file.tell() - start != output.num_bytes:
                raise ValueError(f"{output.name}: {file.tell() - start} bytes for {output.shape}")
        file.flush()
        os.fsync(file.fileno())
        return WrittenFile(num_bytes=file.tell(), sha256=digest.hexdigest())


def _view(content: Tensor) -> memoryview:
    """Return the memory of a tensor of bytes."""
    array: Any = content.numpy()
    return memoryview(array)


def _header(outputs: Iterable[Output]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for output in outputs:
        end = offset + output.num_bytes
        entries[output.name] = {
            "dtype": output.dtype,
            "shape": list(output.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    return struct.pack("<Q", len(text)) + text
