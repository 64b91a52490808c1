"""Staging buffer of an engine worker: receives a version during generation."""

import logging
import mmap
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from common.errors import LongstrideError, WeightSyncError
from common.wire.collective import aligned, views
from common.wire.transfer.changes import apply_changes, digest_of_whole
from common.wire.weight_group import TransferCancelled, WeightGroup, lower_priority
from common.wire.weight_messages import WeightsOffer

logger = logging.getLogger(__name__)

SPARE_BYTES = 1 << 30  # Bytes of a GPU that stay free for the engine's kernels.
LEAVE_S = 2.0  # Seconds for a cancelled transfer to end. After that, new connections are opened.
Prepare = Callable[[Iterable[tuple[str, Tensor]]], None]


@dataclass(frozen=True, slots=True)
class Staged:
    """State of an offer. With an error the version must not be loaded."""

    is_done: bool
    error: str = ""
    is_cancelled: bool = False  # The learner cancelled it.
    seconds: float = 0.0  # Seconds of the transfer.

    def as_dict(self) -> dict[str, Any]:
        """Return the state in the form that crosses the engine's process boundary."""
        return asdict(self)


class _Copy:
    """The buffer with the bytes of a version."""

    def __init__(self, buffer: Tensor, pages: mmap.mmap | None = None) -> None:
        self.buffer = buffer  # [at least total_bytes] uint8
        self.pages = pages  # Memory of the buffer; None without `prepare`.
        self.version = -1  # The version to which changes may be applied; -1: none.


class _StagedOffer:
    """An offer that is being staged, or is staged."""

    def __init__(self, offer: WeightsOffer) -> None:
        self.offer = offer
        self.is_given_up = threading.Event()
        self.state = Staged(is_done=False)


class Staging:
    """Receives one version at a time, in a thread, into one reused buffer.

    If the learner sends changes, the buffer keeps its version, and the changes are applied to it.

    Consumes: the learner's buckets. Waits for: them, at most until the offer's deadlines. Unblocked
    by: `give_up`, and by the next offer.

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
        self._copy: _Copy | None = None
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
        assert self._copy is not None
        return views(self._copy.buffer, self._taken.offer.tensors)

    def check(self, version: int) -> None:
        """Check that a version is staged. Raises: WeightSyncError: another one is, or none."""
        state = self.state()
        found = -1 if self._taken is None else self._taken.offer.version
        if found != version or not state.is_done or state.error:
            raise WeightSyncError(
                f"version {version} cannot be loaded; the staged version is {found}: {state}"
            )

    def _receive(self, taken: _StagedOffer, before: threading.Thread | None) -> None:
        """Receive an offered version, in a thread, and record the outcome in the offer's state."""
        lower_priority()
        offer = taken.offer
        state = Staged(is_done=True, error="staging failed; the engine's log contains the error")
        try:
            self._end_transfer(before)
            if offer.base < 0:
                copy, seconds = self._receive_whole(taken)
            else:
                copy, seconds = self._receive_changes(taken)
            if self._prepare is not None:
                with self._preparing:
                    self._prepare(self._consumed(taken, copy))
            state = Staged(is_done=True, seconds=seconds)
        except (LongstrideError, RuntimeError) as error:  # RuntimeError: torch is out of memory.
            if not isinstance(error, WeightSyncError):
                logger.error("staging failed version=%d", offer.version, exc_info=error)
            is_cancelled = isinstance(error, TransferCancelled)
            state = Staged(is_done=True, error=str(error), is_cancelled=is_cancelled)
        finally:
            taken.state = state

    def _receive_whole(self, taken: _StagedOffer) -> tuple[_Copy, float]:
        """Return the buffer with the whole version, and the seconds of the transfer."""
        offer = taken.offer
        copy = self._buffer_for(offer.total_bytes)
        copy.version = -1  # The buffer is between two versions.
        buffer = copy.buffer[: offer.total_bytes]
        seconds = self._receive_into(buffer, taken)
        if offer.digest:
            copy.version = offer.version
        return copy, seconds

    def _receive_changes(self, taken: _StagedOffer) -> tuple[_Copy, float]:
        """As `_receive_whole`. Raises: WeightSyncError: the result is not that version."""
        offer = taken.offer
        copy = self._copy
        found = -1 if copy is None else copy.version
        if copy is None or found not in (offer.base, offer.version):
            raise WeightSyncError(
                f"version {offer.version} arrives as changes since {offer.base}, but the copy of"
                f" this worker has version {found}; it needs the whole version"
            )
        packed = torch.zeros(offer.total_bytes, dtype=torch.uint8, device=copy.buffer.device)
        seconds = self._receive_into(packed, taken)
        last = offer.tensors[-1]
        buffer = copy.buffer[: aligned(last.offset_bytes + last.num_bytes)]
        if found == offer.base:  # Else they were applied in a transfer that was then cancelled.
            copy.version = -1
            apply_changes(buffer, packed)
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
            self._copy = None
        elif self._group.is_busy and (self._copy is None or self._copy.version < 0):
            self._copy = None

    def _consumed(self, taken: _StagedOffer, copy: _Copy) -> Iterator[tuple[str, Tensor]]:
        """Yield (transformers name, tensor). Memory is freed with the last reference to a tensor.

        The memory stays if the copy is kept for changes.

        Raises: TransferCancelled: another version is to be staged.
        """
        pages = copy.pages
        offer = taken.offer
        assert pages is not None
        for spec in offer.tensors:
            if taken.is_given_up.is_set():
                raise TransferCancelled(f"the transfer of version {offer.version} was cancelled")
            start = spec.offset_bytes
            stop = spec.offset_bytes + spec.num_bytes
            part = memoryview(pages)[start:stop]
            first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            num_bytes = stop // mmap.PAGESIZE * mmap.PAGESIZE - first
            if num_bytes > 0 and copy.version < 0:
                give_back = weakref.finalize(
                    part, pages.madvise, mmap.MADV_DONTNEED, first, num_bytes
                )
                give_back.atexit = False
            tensor = torch.frombuffer(part, dtype=getattr(torch, spec.dtype))
            del part
            yield spec.name, tensor.view(spec.shape)

    def _buffer_for(self, num_bytes: int) -> _Copy:
        """Return the buffer: on the GPU if it fits into free memory, else in pinned memory."""
        if self._copy is None or self._copy.buffer.numel() < num_bytes:
            self._copy = None
            if self._prepare is not None:
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
                pages = mmap.mmap(-1, num_bytes, flags=flags)
                pages.madvise(mmap.MADV_HUGEPAGE)  # Small pages cost a second per GB.
                self._copy = _Copy(torch.frombuffer(pages, dtype=torch.uint8), pages)
                return self._copy
            is_cuda = self._device.type == "cuda"
            free_bytes = torch.cuda.mem_get_info(self._device)[0] if is_cuda else 0
            fits = free_bytes >= num_bytes + SPARE_BYTES
            place = self._device if fits else torch.device("cpu")
            pins = is_cuda and not fits
            buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=place, pin_memory=pins)
            self._copy = _Copy(buffer)
        return self._copy

    def free(self) -> None:
        """Free the buffer of a loaded version; the next version gets a new one."""
        self.give_up()
        if self._thread is not None:
            self._thread.join(LEAVE_S)
        self._taken = None
        self._copy = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def leave(self) -> None:
        """Close the connections."""
        self._group.leave()
