"""A version in memory that the processes of a node share: one writes it, engine workers map it.

The writer is the learner on its own node, and else the worker that received the version. The
memory is an anonymous file (memfd) of the writer. It has no name in any folder, so the kernel frees
it with the last process that has it open, also after SIGKILL. The size of /dev/shm does not limit
it. Engine workers open it under /proc by the writer's process id.
"""
# pyright: reportUnknownMemberType=false

import fcntl
import hashlib
import json
import mmap
import os
import secrets
import struct
import weakref
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from torch import Tensor

from common.errors import WeightSyncError
from common.host.cgroups import memory_limit
from common.weights.buckets import checksum

NAMESPACES = ("pid", "net")  # Processes in different ones count as those of different nodes.
FORM = "pieces"  # Name of the form of memory and checksum. Code of another form is another node.
PREFIX = "longstride-version-"
STAMP = struct.Struct("=q")  # The version at the start of the memory; -1: it is incomplete.
DATA_AT = mmap.PAGESIZE  # Offset of the version's bytes.


class CopyUnreachable(WeightSyncError):
    """This process is not permitted to open the memory of another process."""


def node_id() -> str:
    """Return a name that processes have in common if they can share memory; "" if none can."""
    if not hasattr(os, "memfd_create"):
        return ""
    try:
        parts = [Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")]
        parts += [os.readlink(f"/proc/self/ns/{each}") for each in NAMESPACES]
    except OSError:  # The system has no such files, as outside of Linux.
        return ""
    return hashlib.sha256(f"{FORM} {parts} {os.getuid()}".encode()).hexdigest()[:16]


def check_room(num_bytes: int) -> None:
    """Check that the system has memory for a copy. Raises: WeightSyncError."""
    _, left = memory_limit() or (0, num_bytes)
    room = min(left, psutil.virtual_memory().available)
    if room < num_bytes:
        raise WeightSyncError(
            f"the processes of this node share a copy of {num_bytes / 1e9:.1f} GB of a version, but"
            f" only {room / 1e9:.1f} GB of memory are free; use fewer engines or more memory"
        )


class NodeCopy:
    """Memory of this process with a version, which other workers of the node map.

    Example: copy = NodeCopy(n); write to copy.buffer; copy.version = 3; copy.show() returns a text,
    with which other workers make a `CopyView`. claim() returns False until all views are unlocked.
    """

    pages = None  # Single pages are not freed. The whole copy is.

    def __init__(self, num_bytes: int) -> None:
        """Allocate memory of `num_bytes`. Raises: WeightSyncError: the system has too little."""
        check_room(num_bytes)
        self._name = PREFIX + secrets.token_hex(8)
        try:
            self._file = os.memfd_create(self._name)
            weakref.finalize(self, os.close, self._file)
            os.ftruncate(self._file, DATA_AT + num_bytes)
            pages = mmap.mmap(self._file, DATA_AT + num_bytes)
        except OSError as error:
            raise WeightSyncError(
                f"no shared memory of {num_bytes / 1e9:.1f} GB for a version: {error}"
            ) from error
        self.buffer = torch.frombuffer(pages, dtype=torch.uint8, offset=DATA_AT)
        self.version = -1

    @property
    def version(self) -> int:
        """The version in the memory; -1: it is incomplete."""
        return _stamp_of(self._file)

    @version.setter
    def version(self, version: int) -> None:
        os.pwrite(self._file, STAMP.pack(version), 0)

    def claim(self) -> bool:
        """Return whether this worker may change the bytes: no other worker reads them."""
        return _has_lock(self._file, fcntl.LOCK_EX)

    def show(self, digest: str = "") -> str:
        """Let other processes read the version; return the text by which they find it.

        Args:
            digest: `checksum` of the buffer; "": it is computed here.
        """
        digest = digest or checksum(self.buffer)
        fcntl.flock(self._file, fcntl.LOCK_UN)
        return json.dumps([os.getpid(), self._file, self._name, self.buffer.numel(), digest])


class MappedCopy(NamedTuple):
    """Memory of another process in the address space of this one."""

    name: str  # The random name of the memory.
    buffer: Tensor  # [num_bytes] uint8


class CopyView:
    """A version in the memory of a worker of this node, as read by this worker.

    A write of this process does not reach the memory (copy on write). The bytes do not change
    until `unlock`. The memory exists at least as long as the view.
    """

    pages = None

    def __init__(self, place: str, version: int, *, before: MappedCopy | None = None) -> None:
        """Map the memory of `NodeCopy.show`, lock it, and check its bytes.

        Args:
            before: `mapped` of an earlier view. It is used again for the same memory of another
                process, because the page faults of a new map cost more than the check.

        Raises:
            CopyUnreachable: this process must not open the memory.
            WeightSyncError: the writer has ended, or the memory has other bytes.
        """
        pid, file, name, num_bytes, wanted = json.loads(place)
        self._name = name
        self._file = _opened(f"/proc/{pid}/fd/{file}", name)
        weakref.finalize(self, os.close, self._file)
        if not self.lock() or self.version != version:
            raise WeightSyncError(f"version {version} in the memory of process {pid} was replaced")
        is_checked = pid != os.getpid()
        if is_checked and before is not None and before.name == name:
            self.buffer = before.buffer
            if checksum(self.buffer) == wanted:
                return
        # A page that this process wrote to has no new bytes, so that only a new map is decisive.
        pages = mmap.mmap(self._file, DATA_AT + num_bytes, access=mmap.ACCESS_COPY)
        self.buffer = torch.frombuffer(pages, dtype=torch.uint8, offset=DATA_AT)
        if is_checked and checksum(self.buffer) != wanted:
            raise WeightSyncError(f"version {version} in the memory of process {pid} is damaged")

    @property
    def mapped(self) -> MappedCopy:
        """The memory, for the view of the next version. It may change after `unlock`."""
        return MappedCopy(self._name, self.buffer)

    @property
    def version(self) -> int:
        """The version in the memory now; the writer may replace it while the view is unlocked."""
        return _stamp_of(self._file)

    def lock(self) -> bool:
        """Keep the bytes as they are; return False if their writer changes them now."""
        return _has_lock(self._file, fcntl.LOCK_SH)

    def unlock(self) -> None:
        """Let the writer change the bytes."""
        fcntl.flock(self._file, fcntl.LOCK_UN)


def _opened(path: str, name: str) -> int:
    """Return a file of another process, which must have a name. Raises: as `CopyView`."""
    try:
        if not os.readlink(path).startswith(f"/memfd:{name} "):  # The process id was reused.
            raise FileNotFoundError(f"{path} is another file")
        return os.open(path, os.O_RDONLY)
    except PermissionError as error:
        raise CopyUnreachable(f"the memory of another process cannot be opened: {error}") from error
    except OSError as error:
        raise WeightSyncError(
            f"the process with the copy of this node has ended: {error}"
        ) from error


def _has_lock(file: int, kind: int) -> bool:
    """Lock a file, or return False if another worker has a conflicting lock."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _stamp_of(file: int) -> int:
    return int(STAMP.unpack(os.pread(file, STAMP.size, 0))[0])
