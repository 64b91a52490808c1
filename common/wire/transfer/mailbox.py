"""Buckets that receivers fetch: from the learner's GPU memory (CUDA IPC), or from a shared folder.

The rendezvous store says which part is there and who has taken it; the bytes go another way.
"""
# torch's type stubs lack the sharing of CUDA memory:
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from common.errors import WeightSyncError
from common.store.disk import with_room
from common.wire.rendezvous.client import GroupStore
from common.wire.transfer.buckets import NUM_SLOTS

CHECK_S = 0.25  # between looks whether a transfer is still wanted
CPU = torch.device("cpu")


class Shelf(Protocol):
    """Where parts lie until all have taken them."""

    device: torch.device

    def put(self, index: int, part: Tensor) -> str:
        """Lay a part down; return what tells a receiver where."""
        ...

    def fetch(self, where: str, part: Tensor) -> None:
        """Copy what lies there into `part`."""
        ...


class FolderShelf:
    """Files in a folder that all see, one per slot."""

    device = CPU

    def __init__(
        self, folder: str, epoch: int, *, check: Callable[[], object] = lambda: None
    ) -> None:
        """Make one for a transfer; `folder` is there. `check` ends a wait for room by raising."""
        self._folder = Path(folder)
        self._epoch = epoch
        self._check = check

    def put(self, index: int, part: Tensor) -> str:
        """Write a part to a file; wait while the disk is full.

        Raises: WeightSyncError: it cannot be written.
        """
        name = f"{self._epoch}-{index % (NUM_SLOTS + 1)}.bucket"
        path, content = self._folder / name, cast(Any, part.numpy())
        try:
            with_room(lambda: path.write_bytes(content), path, check=self._check)
        except OSError as error:
            raise WeightSyncError(f"{path}: {error}") from error
        return name

    def fetch(self, where: str, part: Tensor) -> None:
        """Read a part. Raises: WeightSyncError: the file is not there, or not all of it."""
        path = self._folder / where
        try:
            with path.open("rb") as file:
                num_read = file.readinto(cast(Any, part.numpy()))
        except OSError as error:
            raise WeightSyncError(f"{path}: {error}; do learner and actor share it?") from error
        if num_read != part.numel():
            raise WeightSyncError(f"{path}: {num_read} bytes, not {part.numel()}")


class GpuShelf:
    """The slots themselves: memory of one GPU, opened by other processes on it."""

    def __init__(self, device: torch.device) -> None:
        """Make one of a side on this GPU."""
        self.device = device
        self._shared: dict[int, list[Any]] = {}  # by address: how others open that memory
        self._opened: dict[str, torch.UntypedStorage] = {}  # by what was told

    def put(self, index: int, part: Tensor) -> str:
        """Return the handle of a part's memory, once what fills it is done."""
        storage = part.untyped_storage()
        if storage.data_ptr() not in self._shared:
            told: tuple[Any, ...] = storage._share_cuda_()
            fields = [each.hex() if isinstance(each, bytes) else each for each in told]
            self._shared[storage.data_ptr()] = fields
        torch.cuda.current_stream(self.device).synchronize()
        return json.dumps([part.storage_offset(), self._shared[storage.data_ptr()]])

    def fetch(self, where: str, part: Tensor) -> None:
        """Copy a part out of the memory of the process that shares it."""
        offset, fields = json.loads(where)
        shared = [bytes.fromhex(each) if isinstance(each, str) else each for each in fields]
        shared[0] = self.device.index  # of this process; the GPU is the same
        key = json.dumps(fields)
        if key not in self._opened:
            self._opened[key] = torch.UntypedStorage._new_shared_cuda(*shared)
        there = torch.empty(0, dtype=torch.uint8, device=self.device)
        cast(Any, there).set_(self._opened[key], offset, (part.numel(),))
        part.copy_(there)
        torch.cuda.current_stream(self.device).synchronize()


class Mailbox:
    """One transfer over a shelf. A part is taken back when every receiver has taken it.

    Raises: WeightSyncError: the other side did not do its part in time, or `is_left` says stop.
    """

    def __init__(
        self,
        store: GroupStore,
        shelf: Shelf,
        *,
        name: str,
        rank: int,
        world_size: int,
        timeout_s: float,
        is_left: Callable[[], bool],
    ) -> None:
        self.device = shelf.device
        self._store = store
        self._shelf = shelf
        self._name = name  # no other transfer of this store has it
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._is_left = is_left

    def send(self, index: int, part: Tensor) -> "Mail":
        """Lay a part down and say so."""
        self._store.set(self._key(index), self._shelf.put(index, part))
        takers = [self._taken(index, rank) for rank in range(1, self._world_size)]

        def part_with() -> None:
            self._await(takers, f"the takers of part {index}")
            self._store.delete([self._key(index), *takers])  # of thousands of versions

        return Mail(part_with)

    def receive(self, index: int, part: Tensor) -> "Mail":
        """Return what fetches a part when it is waited for."""

        def fetch() -> None:
            self._await([self._key(index)], f"the learner's part {index}")
            self._shelf.fetch(self._store.get(self._key(index)).decode(), part)
            self._store.set(self._taken(index, self._rank), "1")

        return Mail(fetch)

    def _key(self, index: int) -> str:
        return f"mail/{self._name}/{index}"

    def _taken(self, index: int, rank: int) -> str:
        return f"{self._key(index)}/{rank}"

    def _await(self, keys: list[str], what: str) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not self._store.has(keys, within_s=CHECK_S):
            if self._is_left() or time.monotonic() > deadline:
                raise WeightSyncError(f"{what}: not there within {self._timeout_s:g}s")

    def close(self) -> None:
        """Nothing to let go: the store is others', the shelf is the transfer's."""


class Mail:
    """A part on its way through a mailbox."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait


def remove_files(folder: Path) -> None:
    """Remove what transfers have left in a folder."""
    for path in folder.glob("*.bucket"):
        os.unlink(path)
