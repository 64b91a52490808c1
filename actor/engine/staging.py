"""The staging buffer of an engine's worker: a version lands here while generation goes on."""

import logging
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from common.errors import LongstrideError, WeightSyncError
from common.wire.collective import views
from common.wire.weight_group import TransferCancelled, WeightGroup, lower_priority
from common.wire.weight_messages import WeightsOffer

logger = logging.getLogger(__name__)

SPARE_BYTES = 1 << 30  # of a GPU, which the engine's kernels may ask for


@dataclass(frozen=True, slots=True)
class Staged:
    """What became of an offer so far; an error means that nothing may be loaded."""

    is_done: bool
    error: str = ""
    is_cancelled: bool = False  # by the learner
    seconds: float = 0.0  # in which the bytes came

    def as_dict(self) -> dict[str, Any]:
        """Return it as what crosses the engine's process boundary."""
        return asdict(self)


class Staging:
    """Receives a version at a time, in a thread, into one buffer that is kept.

    Consumes: the learner's buckets. Waits for: them, at most the offer's deadlines. Unblocked by:
    the learner's word that the transfer is given up.

    Example: begin(offer) returns at once. state() -> not done, while the model samples. state() ->
    done: every bucket is what was sent. tensors(version) is what to load.
    """

    def __init__(self, device: torch.device) -> None:
        """Make one for a worker that computes on `device`."""
        self._device = device
        self._group = WeightGroup()
        self._buffer: Tensor | None = None  # [at least total_bytes] uint8
        self._offer: WeightsOffer | None = None
        self._state = Staged(is_done=True, error="nothing was offered")
        self._thread: threading.Thread | None = None

    def begin(self, offer: WeightsOffer) -> None:
        """Start to receive; a transfer that still runs has been given up, and is waited for."""
        if self._thread is not None:
            self._thread.join()
        self._offer, self._state = offer, Staged(is_done=False)
        self._thread = threading.Thread(target=self._receive, args=(offer,), daemon=True)
        self._thread.start()

    def state(self) -> Staged:
        """Return what became of the offer so far."""
        return self._state

    def tensors(self, version: int) -> Iterator[tuple[str, Tensor]]:
        """Yield (transformers name, view) of a version.

        Raises: WeightSyncError: it is not what is there.
        """
        state, found = self._state, -1 if self._offer is None else self._offer.version
        if found != version or not state.is_done or state.error:
            raise WeightSyncError(f"version {version} is to be loaded, {found} is staged: {state}")
        assert self._offer is not None
        assert self._buffer is not None
        return views(self._buffer[: self._offer.total_bytes], self._offer.tensors)

    def _receive(self, offer: WeightsOffer) -> None:
        lower_priority()
        try:
            buffer = self._room(offer.total_bytes)[: offer.total_bytes]
            seconds = self._group.receive(buffer, self._device, offer)
            self._state = Staged(is_done=True, seconds=seconds)
        except (LongstrideError, RuntimeError) as error:  # torch raises the latter without memory
            if not isinstance(error, WeightSyncError):
                logger.error("staging failed version=%d", offer.version, exc_info=error)
            is_cancelled = isinstance(error, TransferCancelled)
            self._state = Staged(is_done=True, error=str(error), is_cancelled=is_cancelled)

    def _room(self, num_bytes: int) -> Tensor:
        """Return the buffer: on the GPU if it fits beside what is there, else in pinned memory."""
        if self._buffer is None or self._buffer.numel() < num_bytes:
            self._buffer = None
            is_cuda = self._device.type == "cuda"
            free_bytes = torch.cuda.mem_get_info(self._device)[0] if is_cuda else 0
            fits = free_bytes >= num_bytes + SPARE_BYTES
            place = self._device if fits else torch.device("cpu")
            pins = is_cuda and not fits
            self._buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=place, pin_memory=pins)
        return self._buffer

    def leave(self) -> None:
        """Let the connections go."""
        self._group.leave()
