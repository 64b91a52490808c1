"""Memory of one engine worker for versions: its own, the node's, or a view of the node's.

The view may be one of the learner's memory, if learner and worker share a node.
"""

import mmap
import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from common.errors import WeightSyncError
from common.weights.buckets import CPU, aligned, views
from common.weights.messages import TensorSpec, WeightsOffer
from common.weights.node_copy import CopyView, MappedCopy, NodeCopy

SPARE_BYTES = 1 << 30  # Bytes of a GPU that stay free for the engine's kernels.


class OwnCopy:
    """A buffer with the bytes of a version, for this worker alone."""

    def __init__(self, buffer: Tensor, pages: mmap.mmap | None = None) -> None:
        self.buffer = buffer  # [at least total_bytes] uint8
        self.pages = pages  # Memory of a buffer that is freed part by part; None for others.
        self.version = -1  # The version to which changes may be applied; -1: none.


Copy = OwnCopy | NodeCopy | CopyView


class VersionMemory:
    """Holds the newest version of a worker. For one thread at a time.

    Example of a worker that receives for its node: copy = to_overwrite(v3); write; copy.show().
    Every worker of the node: see(place, v3); load; release(). Then `to_overwrite(v4)` returns the
    same memory. If one worker has not released v3 by then, v4 gets new memory.

    The memory of a view stays mapped until the next version, which is likely to use it again.
    """

    def __init__(self, device: torch.device, *, is_consumed: bool) -> None:
        """Hold versions for a worker of `device`; `is_consumed`: each is read once, on a CPU."""
        self._device = device
        self._is_consumed = is_consumed
        self.own: OwnCopy | None = None
        self.for_node: NodeCopy | None = None  # The memory that other workers of the node map.
        self._view: CopyView | None = None
        self._mapped: MappedCopy | None = None  # Memory of the last view.
        self._is_base = False  # True if changes may follow the version of the view.
        self.shown: Tensor | None = None  # [at least total_bytes] uint8, the version to load.

    def to_overwrite(self, offer: WeightsOffer) -> OwnCopy | NodeCopy:
        """Return memory for the whole version of an offer, with any content.

        Raises: WeightSyncError: there is too little memory.
        """
        num_bytes = whole_bytes(offer)
        self.shown = None
        self._view = None
        self._mapped = None
        if not offer.shares_copy:
            self.for_node = None
            return self._own_for(num_bytes)
        found = self.for_node
        if found is None or found.buffer.numel() < num_bytes or not found.claim():
            found = None  # The old memory is freed first.
            self.for_node = None
            found = self.for_node = NodeCopy(num_bytes)
        return found

    def held(self, offer: WeightsOffer) -> Copy:
        """Return the memory with the base of an offer of changes, or with its version.

        Raises: WeightSyncError: there is none.
        """
        found: list[Copy] = [e for e in (self.own, self.for_node, self._view) if e is not None]
        for each in found:
            if each.version in (offer.base, offer.version):
                return each
        version = max((each.version for each in found), default=-1)
        raise WeightSyncError(
            f"version {offer.version} arrives as changes since {offer.base}, but the copy of this"
            f" worker has version {version}; it needs the whole version"
        )

    def to_change(self, held: Copy, offer: WeightsOffer) -> OwnCopy | NodeCopy:
        """Return memory with the bytes of `held` in which changes may be applied.

        It is `held` itself, unless other workers still read it or the offer needs the other kind
        of memory.

        Raises: WeightSyncError: the bytes of a view were replaced meanwhile.
        """
        if not offer.shares_copy and isinstance(held, OwnCopy):
            return held
        if offer.shares_copy and isinstance(held, NodeCopy) and held.claim():
            return held
        has_bytes = not isinstance(held, CopyView) or held.lock()
        version = held.version
        if not has_bytes or version not in (offer.base, offer.version):
            raise WeightSyncError(
                f"version {offer.base} was replaced in the memory of this node; version"
                f" {offer.version} must be sent whole"
            )
        copy = self.to_overwrite(offer)
        num_bytes = whole_bytes(offer)
        copy.buffer[:num_bytes].copy_(held.buffer[:num_bytes])
        copy.version = version
        return copy

    def see(self, place: str, offer: WeightsOffer) -> Copy:
        """Return the version of an offer in the node's copy, which stays as it is until `release`.

        If a GPU has room for the version, it is copied there.

        Raises: WeightSyncError: as `CopyView`.
        """
        self._view = None
        before = self._mapped
        self._mapped = None  # The memory of a lost learner is freed, also after an error.
        view = self._view = CopyView(place, offer.version, before=before)
        self._mapped = view.mapped
        self._is_base = bool(offer.digest)
        if offer.copy_index > 0:  # Another process has the version.
            self.for_node = None
        num_bytes = whole_bytes(offer)
        if self._place_for(num_bytes) == CPU:
            self.own = None
            return view
        copy = self._own_for(num_bytes)
        copy.version = -1
        copy.buffer[:num_bytes].copy_(view.buffer[:num_bytes])
        self.release()
        return copy

    def release(self) -> None:
        """Let the node's copy change again, once this worker has loaded its part of it."""
        view = self._view
        if view is None:
            return
        view.unlock()
        if not self._is_base:
            self.shown = None
            self._view = None

    def drop_incomplete(self) -> None:
        """Drop memory that an abandoned transfer may still write to."""
        if self.own is not None and self.own.version < 0:
            self.own = None
        if self.for_node is not None and self.for_node.version < 0:
            self.for_node = None

    def free(self) -> None:
        """Drop all memory."""
        self.release()
        self.own = None
        self.for_node = None
        self._view = None
        self._mapped = None
        self.shown = None

    def _own_for(self, num_bytes: int) -> OwnCopy:
        """Return the buffer: on the GPU if it fits into free memory, else in pinned memory."""
        if self.own is None or self.own.buffer.numel() < num_bytes:
            self.own = None
            if self._is_consumed:
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
                pages = mmap.mmap(-1, num_bytes, flags=flags)
                pages.madvise(mmap.MADV_HUGEPAGE)  # Small pages cost a second per GB.
                self.own = OwnCopy(torch.frombuffer(pages, dtype=torch.uint8), pages)
                return self.own
            place = self._place_for(num_bytes)
            pins = self._device.type == "cuda" and place == CPU
            buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=place, pin_memory=pins)
            self.own = OwnCopy(buffer)
        return self.own

    def _place_for(self, num_bytes: int) -> torch.device:
        """Return the device of a buffer: the worker's GPU if it has one with room, else the CPU."""
        if self._device.type != "cuda":
            return CPU
        if self.own is not None and self.own.buffer.numel() >= num_bytes:
            return self.own.buffer.device
        fits = torch.cuda.mem_get_info(self._device)[0] >= num_bytes + SPARE_BYTES
        return self._device if fits else CPU


def whole_bytes(offer: WeightsOffer) -> int:
    """Return the size of the whole version of an offer, which may be one of changes."""
    if offer.base < 0:
        return offer.total_bytes
    last = offer.tensors[-1]
    return aligned(last.offset_bytes + last.num_bytes)


def consumed(copy: Copy, specs: Iterable[TensorSpec]) -> Iterator[tuple[str, Tensor]]:
    """Yield (transformers name, tensor) of a version.

    Memory of an own copy is freed with the last reference to a tensor, unless the copy is kept for
    changes.
    """
    pages = copy.pages
    if pages is None:
        yield from views(copy.buffer, list(specs))
        return
    for spec in specs:
        start = spec.offset_bytes
        stop = spec.offset_bytes + spec.num_bytes
        part = memoryview(pages)[start:stop]
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        num_bytes = stop // mmap.PAGESIZE * mmap.PAGESIZE - first
        if num_bytes > 0 and copy.version < 0:
            give_back = weakref.finalize(part, pages.madvise, mmap.MADV_DONTNEED, first, num_bytes)
            give_back.atexit = False
        tensor = torch.frombuffer(part, dtype=getattr(torch, spec.dtype))
        del part
        yield spec.name, tensor.view(spec.shape)
