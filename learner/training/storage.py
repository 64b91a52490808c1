"""Storage of torch.distributed.checkpoint in which a file holds the bytes of its tensors.

The writer runs in a thread beside training. A file is written by a few system calls, which release
Python's lock. The standard writer calls Python about forty times for each tensor, and each call
waits for the lock that the training loop holds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from common.join.shards import ShardFile, write_manifest
from learner.policy.weight_files import LOCAL, WeightFiles
from learner.training.shards.home import ShardHome

SUFFIX = ".bin"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Place of a tensor, or of one rank's shard of it, in a file of the checkpoint."""

    relative_path: str
    offset: int  # bytes
    length: int  # bytes
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WrittenTensor(WriteResult):
    """A written tensor, and its file if that is on the disk of a further node."""

    file: ShardFile | None = None


class TensorWriter(FileSystemWriter):
    """Writes the tensors of a rank into one file, one after another."""

    def __init__(
        self, folder: Path, *, files: WeightFiles = LOCAL, home: ShardHome | None = None
    ) -> None:
        """Write through `files`, whose node has the folder, or to the folder `home` of this node.

        With a `home` the checkpoint gets a manifest of the files there.
        """
        super().__init__(folder)
        self._files = files
        self._home = home

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make the folder. Ranks of other nodes need none: rank 0 makes it."""
        return plan if self._files.is_remote else super().prepare_local_plan(plan)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write and sync the file; return the places of its tensors."""
        name = f"{cast(Any, plan.storage_data).prefix}0{SUFFIX}"
        parts: list[memoryview] = []
        places: list[tuple[MetadataIndex, StoredTensor]] = []
        offset = 0
        for item in plan.items:
            tensor = cast(Tensor, planner.resolve_data(item)).detach().contiguous()
            part = _bytes_of(tensor)
            place = StoredTensor(name, offset, len(part), tensor.dtype, tuple(tensor.shape))
            places.append((item.index, place))
            parts.append(part)
            offset += len(part)
        path = Path(self.path) / name
        file = None
        if self._home is None:
            self._files.write(path, parts)
        elif parts:
            file = self._home.write(path, parts)
        return _completed([WrittenTensor(index, at.length, at, file) for index, at in places])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest of files on other nodes, if there are any, and the metadata."""
        written = [cast(WrittenTensor, each) for part in results for each in part]
        files = {each.file for each in written if each.file is not None}
        if files:
            write_manifest(Path(self.path).parent, files)
        super().finish(metadata, results)


class TensorReader(FileSystemReader):
    """Reads the files of `TensorWriter`, and those of the standard writer."""

    def __init__(
        self, folder: Path, *, files: WeightFiles = LOCAL, places: Mapping[str, Path] | None = None
    ) -> None:
        """Read through `files`.

        Args:
            places: paths on this node of files that are not in the folder, by name.
        """
        super().__init__(folder)
        self._files = files
        self._places = places or {}

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
            usual = Path(self.path) / place.relative_path
            found = _read(self._files, self._places.get(place.relative_path, usual), place)
            for dim, (start, size) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                found = found.narrow(dim, start, size)
            target = planner.resolve_tensor(item).detach()
            target.copy_(found)
            planner.commit_tensor(item, target)
        return _completed(None)


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(cast(Any, tensor.reshape(-1).view(torch.uint8).numpy()))


def _completed(result: Any) -> Future[Any]:
    """Return a future that already has its result."""
    future: Future[Any] = Future()
    future.set_result(result)
    return future


def _read(files: WeightFiles, path: Path, place: StoredTensor) -> Tensor:
    """Return a tensor from its place in a file."""
    tensor = torch.empty(place.shape, dtype=place.dtype)
    files.read(path, place.offset, _bytes_of(tensor))
    return tensor
