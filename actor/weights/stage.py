"""Staging buffer of an engine worker: receives a version during generation."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from actor.weights.memory import Copy, OwnCopy, VersionMemory, consumed, whole_bytes
from common.errors import LongstrideError, WeightSyncError
from common.weights.buckets import check_layout, views
from common.weights.delta import apply_changes, digest_of_whole
from common.weights.messages import WeightsOffer
from common.weights.node_copy import CopyUnreachable, NodeCopy
from common.weights.transport import TransferCancelled, WeightGroup, lower_priority

logger = logging.getLogger(__name__)

LEAVE_S = 2.0  # Seconds for a cancelled transfer to end. After that, new connections are opened.
Prepare = Callable[[Iterable[tuple[str, Tensor]]], None]


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
        return self._receive_changes(taken)

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

    def _receive_changes(self, taken: _StagedOffer) -> tuple[OwnCopy | NodeCopy, float]:
        """As `_receive_whole`. Raises: WeightSyncError: the result is not that version."""
        offer = taken.offer
        held = self.memory.held(offer)
        packed = torch.zeros(offer.total_bytes, dtype=torch.uint8, device=held.buffer.device)
        seconds = self._receive_into(packed, taken)
        copy = self.memory.to_change(held, offer)
        buffer = copy.buffer[: whole_bytes(offer)]
        if copy.version == offer.base:  # Else they were applied in a transfer that was cancelled.
            copy.version = -1
            apply_changes(buffer, packed.to(buffer.device))
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
