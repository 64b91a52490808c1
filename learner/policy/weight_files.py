"""Files of weights and checkpoints: on this machine, or read and written on rank 0's node."""

import json
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from learner.policy.model_shape import weight_files

MAX_PARTS = 1_000  # Buffers of one system call; Linux allows 1,024.
PART_BYTES = 4_000_000  # Content of one message between two nodes.
HEADER_BYTES = 8  # Size of the number of bytes of a header, at the start of a safetensors file.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class WeightFiles:
    """Files of weights on this machine."""

    is_remote = False

    def weights_in(self, folder: Path) -> list[Path]:
        """Return the safetensors files of a checkpoint in their order."""
        return weight_files(folder)

    def names(self, folder: str) -> list[str]:
        """Return the relative paths of the files below a folder; [] without the folder."""
        return [str(each.relative_to(folder)) for each in Path(folder).rglob("*") if each.is_file()]

    def open_weights(self, path: Path) -> Any:
        """Return the context of a reader as `safetensors.safe_open` has it."""
        return safe_open(path, "pt")

    def read(self, path: Path, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes at `offset`. Raises: EOFError: the file is too short."""
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            while view:
                count = file.readinto(view)
                if not count:
                    raise EOFError(f"{path}: the file ends within a tensor")
                view = view[count:]

    def write(self, path: Path, parts: Sequence[memoryview]) -> None:
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


LOCAL = WeightFiles()


class FileService(Protocol):
    """Operations on the files of rank 0's node. They raise LongstrideError if it is lost."""

    def names(self, folder: str) -> list[str]: ...

    def read(self, path: str, offset: int, num_bytes: int) -> bytes: ...

    def write(self, path: str, offset: int, content: bytes) -> None: ...


class RemoteWeightFiles(WeightFiles):
    """Files of weights on rank 0's node. A rank reads the bytes of its own shard only.

    A folder in `mirrored` has the small files of a folder on rank 0's node. Its weights are read
    there. All files are written there.
    """

    is_remote = True

    def __init__(self, service: FileService, mirrored: Mapping[str, str]) -> None:
        """Map local folders to the folders on rank 0's node that they mirror."""
        self._service = service
        self._mirrored = mirrored

    def weights_in(self, folder: Path) -> list[Path]:
        remote = self._mirrored.get(str(folder))
        if remote is None:
            return super().weights_in(folder)
        names = self._service.names(remote)
        return weight_files(folder, [name for name in names if not Path(name).parts[1:]])

    def names(self, folder: str) -> list[str]:
        return self._service.names(folder)

    def open_weights(self, path: Path) -> Any:
        if path.exists():  # A copy of the model on this machine.
            return super().open_weights(path)
        return _remote_reader(self, path)

    def read(self, path: Path, offset: int, view: memoryview) -> None:
        """Fill `view` from rank 0's node, unless the file is on this machine."""
        if path.exists():
            super().read(path, offset, view)
            return
        there = self._there(path)
        for start in range(0, len(view), PART_BYTES):
            part = view[start : start + PART_BYTES]
            content = self._service.read(there, offset + start, len(part))
            if len(content) != len(part):
                raise EOFError(f"{there} on rank 0's node: the file ends within a tensor")
            part[:] = content

    def write(self, path: Path, parts: Sequence[memoryview]) -> None:
        offset = 0
        for part in parts:
            for start in range(0, len(part), PART_BYTES):
                piece = part[start : start + PART_BYTES]
                self._service.write(str(path), offset, bytes(piece))
                offset += len(piece)

    def _there(self, path: Path) -> str:
        """Return the path on rank 0's node."""
        for parent in path.parents:
            if remote := self._mirrored.get(str(parent)):
                return f"{remote}/{path.relative_to(parent)}"
        return str(path)


class RemoteTensors:
    """The tensors of a safetensors file on rank 0's node, as `safetensors.safe_open` has them."""

    def __init__(self, files: RemoteWeightFiles, path: Path) -> None:
        """Read the header of the file."""
        self._files = files
        self._path = path
        size = bytearray(HEADER_BYTES)
        files.read(path, 0, memoryview(size))
        header = bytearray(int.from_bytes(size, "little"))
        files.read(path, HEADER_BYTES, memoryview(header))
        self._begin = HEADER_BYTES + len(header)
        self._tensors: dict[str, Any] = json.loads(header)
        self._tensors.pop("__metadata__", None)

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self._tensors)

    def get_tensor(self, name: str) -> Tensor:
        """Return a whole tensor."""
        return self._rows(name, 0, None)

    def get_slice(self, name: str) -> "RemoteSlice":
        """Return a tensor that is read by rows."""
        return RemoteSlice(self, name)

    def shape(self, name: str) -> list[int]:
        """Return the shape of a tensor."""
        return self._tensors[name]["shape"]

    def _rows(self, name: str, start: int, stop: int | None) -> Tensor:
        """Return rows of a tensor, or a whole tensor for `stop` None."""
        shape = self.shape(name)
        first, last = self._tensors[name]["data_offsets"]
        if stop is not None:
            row_bytes = (last - first) // max(shape[0], 1)
            last = first + max(stop, start) * row_bytes
            first += start * row_bytes
            shape = [max(stop - start, 0), *shape[1:]]
        tensor = torch.empty(shape, dtype=DTYPES[self._tensors[name]["dtype"]])
        if tensor.numel():
            view = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # pyright: ignore
            self._files.read(self._path, self._begin + first, view)
        return tensor


class RemoteSlice:
    """One tensor of a remote file, read by rows."""

    def __init__(self, tensors: RemoteTensors, name: str) -> None:
        self._tensors = tensors
        self._name = name

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""
        return self._tensors.shape(self._name)

    def __getitem__(self, rows: slice) -> Tensor:
        num = self.get_shape()[0]
        start = min(rows.start or 0, num)
        stop = num if rows.stop is None else min(rows.stop, num)
        return self._tensors._rows(self._name, start, stop)


@contextmanager
def _remote_reader(files: RemoteWeightFiles, path: Path) -> Generator[RemoteTensors]:
    yield RemoteTensors(files, path)
