"""Storage of torch.distributed.checkpoint in which a file holds the bytes of its tensors.

The writer runs in a thread beside training. A file is written by a few system calls, which release
Python's lock. The standard writer calls Python about forty times for each tensor, and each call
waits for the lock that the training loop holds.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

SUFFIX = ".bin"
MAX_PARTS = 1_000  # Buffers of one system call; Linux allows 1,024.


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Place of a tensor, or of one rank's shard of it, in a file of the checkpoint."""

    relative_path: str
    offset: int  # bytes
    length: int  # bytes
    dtype: torch.dtype
    shape: tuple[int, ...]


class TensorWriter(FileSystemWriter):
    """Writes the tensors of a rank into one file, one after another."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write and sync the file; return the places of its tensors."""
        name = f"{cast(Any, plan.storage_data).prefix}0{SUFFIX}"
        parts: list[memoryview] = []
        results: list[WriteResult] = []
        offset = 0
        for item in plan.items:
            tensor = cast(Tensor, planner.resolve_data(item)).detach().contiguous()
            part = _bytes_of(tensor)
            place = StoredTensor(name, offset, len(part), tensor.dtype, tuple(tensor.shape))
            results.append(
                WriteResult(index=item.index, size_in_bytes=len(part), storage_data=place)
            )
            parts.append(part)
            offset += len(part)
        _write_file(Path(self.path) / name, parts)
        return _done(results)


class TensorReader(FileSystemReader):
    """Reads the files of `TensorWriter`, and those of the standard writer."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of the plan. Raises: EOFError: a file is shorter than its tensors."""
        standard = [
            each
            for each in plan.items
            if not isinstance(self.storage_data[each.storage_index], StoredTensor)
        ]
        if standard:
            return super().read_data(replace(plan, items=standard), planner)
        for item in plan.items:
            place = cast(StoredTensor, self.storage_data[item.storage_index])
            found = _read(Path(self.path) / place.relative_path, place)
            for dim, (start, size) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                found = found.narrow(dim, start, size)
            target = planner.resolve_tensor(item).detach()
            target.copy_(found)
            planner.commit_tensor(item, target)
        return _done(None)


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(cast(Any, tensor.reshape(-1).view(torch.uint8).numpy()))


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


def _write_file(path: Path, parts: Sequence[memoryview]) -> None:
    """Write all parts into a new file, and sync it."""
    left = [part for part in parts if len(part)]
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        begin = 0
        while begin < len(left):
            written = os.writev(descriptor, left[begin : begin + MAX_PARTS])
            while begin < len(left) and written >= len(left[begin]):
                written -= len(left[begin])
                begin += 1
            if written:  # One call writes two gigabytes at most, so a part may be left half.
                left[begin] = left[begin][written:]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path, place: StoredTensor) -> Tensor:
    tensor = torch.empty(place.shape, dtype=place.dtype)
    with path.open("rb", buffering=0) as file:
        file.seek(place.offset)
        view = _bytes_of(tensor)
        while view:
            count = file.readinto(view)
            if not count:
                raise EOFError(f"{path}: the file ends within a tensor")
            view = view[count:]
    return tensor
