"""Transport by fetching: receivers copy buckets from GPU memory (CUDA IPC) or a shared folder.

The rendezvous store holds the location of each part and the acknowledgements of the receivers.
It does not carry the bytes.
"""
# torch's type stubs lack the sharing of CUDA memory:
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from common.errors import WeightSyncError
from common.store.disk import with_room
from common.text import is_file_name
from common.weights.buckets import NUM_SLOTS
from common.weights.rendezvous_client import GroupStore

logger = logging.getLogger(__name__)

RELEASE_S = 5.0  # Seconds for the receivers to close shared memory after a transfer.
CHECK_S = 0.25  # Seconds between two checks whether a transfer was cancelled.
CPU = torch.device("cpu")


class PartStorage(Protocol):
    """A place that holds parts until all receivers have copied them."""

    device: torch.device

    def put(self, index: int, part: Tensor) -> str:
        """Store a part; return its location for receivers."""
        ...

    def fetch(self, where: str, part: Tensor) -> None:
        """Copy the part at the location `where` into `part`."""
        ...

    def release(self) -> None:
        """Close memory of other processes that `fetch` has opened."""
        ...


class FolderStorage:
    """A shelf of files in a shared folder, one file per slot."""

    device = CPU

    def __init__(
        self, folder: str, epoch: int, *, check: Callable[[], object] = lambda: None
    ) -> None:
        """Use an existing folder. `check` can raise to end a wait for free disk space."""
        self._folder = Path(folder)
        self._epoch = epoch
        self._check = check

    def put(self, index: int, part: Tensor) -> str:
        """Write a part to a file; wait while the disk is full.

        Raises: WeightSyncError: the file cannot be written.
        """
        name = f"{self._epoch}-{index % (NUM_SLOTS + 1)}.bucket"
        path, content = self._folder / name, cast(Any, part.numpy())
        try:
            with_room(lambda: path.write_bytes(content), path, check=self._check)
        except OSError as error:
            raise WeightSyncError(f"{path}: {error}") from error
        return name

    def fetch(self, where: str, part: Tensor) -> None:
        """Read a part. Raises: WeightSyncError: the file is missing or incomplete."""
        path = self._folder / where
        if not is_file_name(where):
            raise WeightSyncError(f"{where!r} is not the name of a bucket")
        try:
            with path.open("rb") as file:
                num_read = file.readinto(cast(Any, part.numpy()))
        except OSError as error:
            remedy = "learner and actor must share this folder"
            raise WeightSyncError(f"{path}: {error}; {remedy}") from error
        if num_read != part.numel():
            raise WeightSyncError(f"{path}: has {num_read} bytes instead of {part.numel()}")

    def release(self) -> None:
        """Do nothing: each file is closed after it is read."""


class GpuStorage:
    """A shelf of the slots in GPU memory, which other processes on the same GPU open."""

    def __init__(self, device: torch.device) -> None:
        """Create the shelf of a sender or a receiver on this GPU."""
        self.device = device
        self._shared: dict[int, list[Any]] = {}  # CUDA IPC handles by memory address.
        self._opened: dict[str, torch.UntypedStorage] = {}  # Opened memory by handle.

    def put(self, index: int, part: Tensor) -> str:
        """Return the handle of a part's memory, after the current stream has filled it."""
        storage = part.untyped_storage()
        if storage.data_ptr() not in self._shared:
            shared: tuple[Any, ...] = storage._share_cuda_()
            fields = [each.hex() if isinstance(each, bytes) else each for each in shared]
            self._shared[storage.data_ptr()] = fields
        torch.cuda.current_stream(self.device).synchronize()
        return json.dumps([part.storage_offset(), self._shared[storage.data_ptr()]])

    def fetch(self, where: str, part: Tensor) -> None:
        """Copy a part out of the memory of the process that shares it."""
        offset, fields = json.loads(where)
        shared = [bytes.fromhex(each) if isinstance(each, str) else each for each in fields]
        shared[0] = self.device.index  # The same GPU may have another index in this process.
        key = json.dumps(fields)
        if key not in self._opened:
            self._opened[key] = torch.UntypedStorage._new_shared_cuda(*shared)
        there = torch.empty(0, dtype=torch.uint8, device=self.device)
        cast(Any, there).set_(self._opened[key], offset, (part.numel(),))
        part.copy_(there)
        torch.cuda.current_stream(self.device).synchronize()

    def release(self) -> None:
        """Close the memory of the process that shares it, which may end from now on."""
        self._opened.clear()
        torch.cuda.ipc_collect()


class Mailbox:
    """One transfer over a shelf. A part is deleted after every receiver has copied it.

    Raises: WeightSyncError: a wait for the other side timed out, or `is_left` returned True.
    """

    def __init__(
        self,
        store: GroupStore,
        storage: PartStorage,
        *,
        name: str,
        rank: int,
        world_size: int,
        timeout_s: float,
        is_left: Callable[[], bool],
    ) -> None:
        self.device = storage.device
        self._store = store
        self._storage = storage
        self._name = name  # Unique among the transfers of this store.
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._is_left = is_left

    def send(self, index: int, part: Tensor) -> "MailboxTransfer":
        """Store a part and publish its location."""
        self._store.set(self._key(index), self._storage.put(index, part))
        takers = [self._taken(index, rank) for rank in range(1, self._world_size)]

        def delete_part() -> None:
            """Delete a part once all receivers have copied it."""
            self._wait_for(takers, f"the receivers of part {index}")
            # Without this the store would grow over thousands of versions.
            self._store.delete([self._key(index), *takers])

        return MailboxTransfer(delete_part)

    def receive(self, index: int, part: Tensor) -> "MailboxTransfer":
        """Return a pending part, which `wait` fetches."""

        def fetch() -> None:
            """Wait for a part, copy it, and confirm that."""
            self._wait_for([self._key(index)], f"the learner's part {index}")
            self._storage.fetch(self._store.get(self._key(index)).decode(), part)
            self._store.set(self._taken(index, self._rank), "1")

        return MailboxTransfer(fetch)

    def finish(self) -> None:
        """Close shared memory after the last part; the sender waits for the receivers.

        A process that ends while others have its CUDA memory open leaves it in an undefined state.
        A receiver that does not close the memory in time is logged, since it has the whole version.
        """
        self._storage.release()
        if self._rank > 0:
            self._store.set(self._released(self._rank), "1")
            return
        keys = [self._released(rank) for rank in range(1, self._world_size)]
        deadline = time.monotonic() + RELEASE_S
        while not self._store.has(keys, within_s=CHECK_S):
            if self._is_left() or time.monotonic() > deadline:
                logger.warning("an engine has not closed shared memory transfer=%s", self._name)
                return
        self._store.delete(keys)

    def _released(self, rank: int) -> str:
        """Return the key that a receiver sets when it has closed shared memory."""
        return f"mail/{self._name}/released/{rank}"

    def _key(self, index: int) -> str:
        """Return the key of a part's location."""
        return f"mail/{self._name}/{index}"

    def _taken(self, index: int, rank: int) -> str:
        """Return the key that a receiver sets when it has copied a part."""
        return f"{self._key(index)}/{rank}"

    def _wait_for(self, keys: list[str], what: str) -> None:
        """Wait until keys exist. Raises: WeightSyncError: the wait timed out."""
        deadline = time.monotonic() + self._timeout_s
        while not self._store.has(keys, within_s=CHECK_S):
            if self._is_left() or time.monotonic() > deadline:
                raise WeightSyncError(f"{what}: not available within {self._timeout_s:g} s")

    def close(self) -> None:
        """Do nothing: other objects own the store and the shelf."""


class MailboxTransfer:
    """A part in transit through a mailbox."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait


def remove_files(folder: Path) -> None:
    """Remove the remaining bucket files of transfers from a folder."""
    for path in folder.glob("*.bucket"):
        os.unlink(path)
