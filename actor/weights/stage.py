"""Receives a version beside the model that samples, into memory of an engine worker.

The memory is the worker's own, the node's, or a view of the node's. The view may be one of the
learner's memory, if learner and worker share a node.
"""

import logging
import mmap
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from common.errors import LongstrideError, WeightSyncError
from common.weights.buckets import CPU, aligned, check_layout, views
from common.weights.delta import apply_delta, digest_of_whole
from common.weights.messages import TensorSpec, WeightsOffer
from common.weights.node_copy import CopyUnreachable, CopyView, MappedCopy, NodeCopy
from common.weights.transport import TransferCancelled, WeightGroup, lower_priority

logger = logging.getLogger(__name__)

LEAVE_S = 2.0  # Seconds for a cancelled transfer to end. After that, new connections are opened.
SPARE_BYTES = 1 << 30  # Bytes of a GPU that stay free for the engine's kernels.
Prepare = Callable[[Iterable[tuple[str, Tensor]]], None]


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
        copy = self.for_node
        if copy is None or copy.buffer.numel() < num_bytes or not copy.claim():
            copy = None  # The old memory is freed first.
            self.for_node = None
            copy = self.for_node = NodeCopy(num_bytes)
        return copy

    def held(self, offer: WeightsOffer) -> Copy:
        """Return the memory with the base of an offer of changes, or with its version.

        Raises: WeightSyncError: there is none.
        """
        copies: list[Copy] = [
            copy for copy in (self.own, self.for_node, self._view) if copy is not None
        ]
        for copy in copies:
            if copy.version in (offer.base, offer.version):
                return copy
        version = max((copy.version for copy in copies), default=-1)
        raise WeightSyncError(
            f"version {offer.version} arrives as a delta to {offer.base}, but the copy of this"
            f" worker has version {version}; it needs the whole version"
        )

    def to_change(self, current: Copy, offer: WeightsOffer) -> OwnCopy | NodeCopy:
        """Return memory with the bytes of `current` in which changes may be applied.

        It is `current` itself, unless other workers still read it or the offer needs the other kind
        of memory.

        Raises: WeightSyncError: the bytes of a view were replaced meanwhile.
        """
        if not offer.shares_copy and isinstance(current, OwnCopy):
            return current
        if offer.shares_copy and isinstance(current, NodeCopy) and current.claim():
            return current
        has_bytes = not isinstance(current, CopyView) or current.lock()
        version = current.version
        if not has_bytes or version not in (offer.base, offer.version):
            raise WeightSyncError(
                f"version {offer.base} was replaced in the memory of this node; version"
                f" {offer.version} must be sent whole"
            )
        copy = self.to_overwrite(offer)
        num_bytes = whole_bytes(offer)
        copy.buffer[:num_bytes].copy_(current.buffer[:num_bytes])
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


@dataclass(frozen=True, slots=True)
class Staged:
    """State of an offer. With an error the version must not be loaded."""

    is_done: bool
    error: str = ""
    is_cancelled: bool = False  # The learner cancelled it, or the node's receiver failed.
    is_unreachable: bool = False  # This worker cannot open the copy of another process.
    seconds: float = 0.0  # Seconds of the transfer.

    def as_dict(self) -> dict[str, Any]:
        """Return the state in the form that crosses the engine's process boundary."""
        return asdict(self)


def failure_of(failed: list[Staged]) -> WeightSyncError:
    """Return the error of an offer that these workers of an engine have not staged."""
    kind = WeightSyncError
    if failed[0].is_cancelled:
        kind = TransferCancelled
    elif any(worker.is_unreachable for worker in failed):
        kind = CopyUnreachable
    return kind("; ".join(worker.error for worker in failed))


class _StagedOffer:
    """An offer that is being staged, or is staged."""

    def __init__(self, offer: WeightsOffer) -> None:
        self.offer = offer
        self.is_given_up = threading.Event()
        self.state = Staged(is_done=False)


class Staging:
    """Receives one version at a time, in a thread, into one reused buffer.

    If the learner sends changes, the buffer keeps its version, and the changes are applied to it.

    If several workers of a node share a copy, one of them receives it into memory that the others
    map once it is complete. On the learner's node all workers map the learner's copy. Each worker
    checks the bytes, and loads its own part of them.

    Consumes: the learner's buckets, or the copy of the node. Waits for: them, at most until the
    offer's deadlines. Unblocked by: `give_up`, and by the next offer.

    Example: begin(offer) returns at once. state() -> not done, while the model samples. state() ->
    done: every bucket arrived intact. tensors(version) yields the tensors to load.

    With `prepare`, all work on a version that is possible during generation is done by then, and
    the tensors are released. Their memory is freed as they are consumed, so that there is one copy
    at a time.
    """

    def __init__(self, device: torch.device, prepare: Prepare | None = None) -> None:
        """Create the staging of a worker that computes on `device`; `prepare` is for CPUs."""
        self._device = device
        self._prepare = prepare
        self._group = WeightGroup()
        self.memory = VersionMemory(device, is_consumed=prepare is not None)
        self._taken: _StagedOffer | None = None
        self._preparing = threading.Lock()
        self._thread: threading.Thread | None = None

    def begin(self, offer: WeightsOffer) -> None:
        """Start to receive an offer, and cancel a running transfer. Returns at once."""
        self.give_up()
        taken = _StagedOffer(offer)
        before = self._thread
        self._taken = taken
        self._thread = threading.Thread(target=self._receive, args=(taken, before), daemon=True)
        self._thread.start()

    def give_up(self) -> None:
        """Cancel the running transfer, if there is one. A staged version stays."""
        if self._taken is not None:
            self._taken.is_given_up.set()

    def state(self) -> Staged:
        """Return the state of the current offer."""
        nothing = Staged(is_done=True, error="no version was offered")
        return nothing if self._taken is None else self._taken.state

    def tensors(self, version: int) -> Iterator[tuple[str, Tensor]]:
        """Yield (transformers name, view) of a version. Raises: WeightSyncError: as `check`."""
        self.check(version)
        assert self._taken is not None
        assert self.memory.shown is not None
        return views(self.memory.shown, self._taken.offer.tensors)

    def check(self, version: int) -> None:
        """Check that a version is staged. Raises: WeightSyncError: another one is, or none."""
        state = self.state()
        staged = -1 if self._taken is None else self._taken.offer.version
        if staged != version or not state.is_done or state.error:
            raise WeightSyncError(
                f"version {version} cannot be loaded; the staged version is {staged}: {state}"
            )

    def _receive(self, taken: _StagedOffer, before: threading.Thread | None) -> None:
        """Receive an offered version, in a thread, and record the outcome in the offer's state."""
        lower_priority()
        offer = taken.offer
        state = Staged(is_done=True, error="staging failed; the engine's log contains the error")
        try:
            self._end_transfer(before)
            check_layout(offer)
            copy, seconds = self._take(taken)
            self.memory.shown = copy.buffer
            if self._prepare is not None:
                with self._preparing:
                    self._prepare(self._consumed(taken, copy))
                self.memory.release()
            state = Staged(is_done=True, seconds=seconds)
        except (LongstrideError, RuntimeError) as error:  # RuntimeError: torch is out of memory.
            if not isinstance(error, WeightSyncError):
                logger.error("staging failed version=%d", offer.version, exc_info=error)
            state = Staged(
                is_done=True,
                error=str(error),
                is_cancelled=isinstance(error, TransferCancelled),
                is_unreachable=isinstance(error, CopyUnreachable),
            )
        finally:
            taken.state = state

    def _take(self, taken: _StagedOffer) -> tuple[Copy, float]:
        """Return memory with an offered version, and the seconds of the transfer."""
        offer = taken.offer
        if not offer.shares_copy:
            return self._receive_from_learner(taken)
        started = time.monotonic()
        if offer.copy_index == 0:
            place, seconds = self._receive_for_node(taken)
            return self.memory.see(place, offer), seconds
        if offer.is_in_memory:
            place = offer.copy_key
        else:
            place = self._group.find_copy(offer, is_cancelled=taken.is_given_up.is_set)
        return self.memory.see(place, offer), time.monotonic() - started

    def _receive_for_node(self, taken: _StagedOffer) -> tuple[str, float]:
        """Receive a version for all workers of the node, and report its place or the failure."""
        try:
            copy, seconds = self._receive_from_learner(taken)
            assert isinstance(copy, NodeCopy)  # The offer is shared.
            place = copy.show()
        except TransferCancelled:  # The learner cancels it at the other workers, too.
            raise
        except (LongstrideError, RuntimeError) as error:
            self._group.report_copy(taken.offer, error=str(error))
            raise
        self._group.report_copy(taken.offer, place=place)
        return place, seconds

    def _receive_from_learner(self, taken: _StagedOffer) -> tuple[OwnCopy | NodeCopy, float]:
        if taken.offer.base < 0:
            return self._receive_whole(taken)
        return self._receive_delta(taken)

    def _receive_whole(self, taken: _StagedOffer) -> tuple[OwnCopy | NodeCopy, float]:
        """Return the buffer with the whole version, and the seconds of the transfer."""
        offer = taken.offer
        copy = self.memory.to_overwrite(offer)
        copy.version = -1  # The buffer is between two versions.
        buffer = copy.buffer[: offer.total_bytes]
        seconds = self._receive_into(buffer, taken)
        if offer.digest or offer.shares_copy:
            copy.version = offer.version
        return copy, seconds

    def _receive_delta(self, taken: _StagedOffer) -> tuple[OwnCopy | NodeCopy, float]:
        """As `_receive_whole`. Raises: WeightSyncError: the result is not that version."""
        offer = taken.offer
        current = self.memory.held(offer)
        packed = torch.zeros(offer.total_bytes, dtype=torch.uint8, device=current.buffer.device)
        seconds = self._receive_into(packed, taken)
        copy = self.memory.to_change(current, offer)
        buffer = copy.buffer[: whole_bytes(offer)]
        if copy.version == offer.base:  # Else they were applied in a transfer that was cancelled.
            copy.version = -1
            apply_delta(buffer, packed.to(buffer.device))
        if digest_of_whole(buffer) != offer.digest:
            copy.version = -1
            raise WeightSyncError(
                f"the changes since version {offer.base} do not lead to version {offer.version}:"
                " the digest of the whole differs; it must be sent whole"
            )
        copy.version = offer.version
        return copy, seconds

    def _receive_into(self, buffer: Tensor, taken: _StagedOffer) -> float:
        return self._group.receive(
            buffer, self._device, taken.offer, is_cancelled=taken.is_given_up.is_set
        )

    def _end_transfer(self, before: threading.Thread | None) -> None:
        """Wait for a cancelled transfer. If it does not end, abandon its connections and buffer."""
        if before is not None:
            before.join(LEAVE_S)
        if before is not None and before.is_alive():
            logger.warning("abandoned cancelled transfer that does not end; reconnecting")
            self._group = WeightGroup()
            self.memory.free()
        elif self._group.is_busy:
            self.memory.drop_incomplete()
        self.memory.release()

    def _consumed(self, taken: _StagedOffer, copy: Copy) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a version to prepare, as `consumed` does.

        Raises: TransferCancelled: another version is to be staged.
        """
        version = taken.offer.version
        for name, tensor in consumed(copy, taken.offer.tensors):
            if taken.is_given_up.is_set():
                raise TransferCancelled(f"the transfer of version {version} was cancelled")
            yield name, tensor

    def free(self) -> None:
        """Free the buffer of a loaded version; the next version gets a new one."""
        self.give_up()
        if self._thread is not None:
            self._thread.join(LEAVE_S)
        self._taken = None
        self.memory.free()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def leave(self) -> None:
        """Close the connections."""
        self._group.leave()
