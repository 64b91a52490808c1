"""Our backend of vLLM's weight transfer: what was staged is loaded, layer by layer."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from vllm.distributed import get_tp_group
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from actor.engine.prepared import Prepared, begin_reload, can_prepare, end_reload
from actor.engine.staging import Staging
from common.wire.codec import decode
from common.wire.weight_messages import WeightsOffer

BACKEND = "longstride"
RELOAD_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"


@dataclass
class OfferInfo(WeightTransferInitInfo):
    """Which version to stage."""

    offer: list[bytes]  # an encoded WeightsOffer, its rank that of the engine's first worker


@dataclass
class LoadInfo(WeightTransferUpdateInfo):
    """Which version to load; it must be the staged one."""

    version: int


class StagedTransferEngine(WeightTransferEngine[OfferInfo, LoadInfo]):
    """Stages a version while the engine generates, and loads it while it is paused.

    `init_transfer_engine` takes the worker's place among a version's receivers and returns at once.
    Where a model can be made ready beside generation, it is, and the load is a swap of pointers.
    """

    init_info_cls: ClassVar[type[OfferInfo]] = OfferInfo  # pyright: ignore
    update_info_cls: ClassVar[type[LoadInfo]] = LoadInfo  # pyright: ignore

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # vLLM warns at every reload of layers that no checkpoint has weights for (rotary tables).
        logging.getLogger(RELOAD_LOGGER).setLevel(logging.ERROR)
        self._prepares = can_prepare(self.model, self.vllm_config, self.device)
        self._prepared: Prepared | None = None
        self._is_half = False  # an update began and did not end
        self.staging = Staging(self.device, self._prepare if self._prepares else None)

    def init_transfer_engine(self, init_info: OfferInfo) -> None:
        """Begin to receive an offered version; of several workers each has a rank of its own."""
        offer: WeightsOffer = decode(init_info.offer)
        own_rank = offer.rank + get_tp_group().rank_in_group
        self.staging.begin(replace(offer, rank=own_rank))

    def _prepare(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Make a staged version ready, in the staging thread."""
        if self._prepared is not None:
            self._prepared.release()  # it was never loaded
        self._prepared = Prepared(self.model, self.vllm_config)
        self._prepared.load(tensors)

    def start_weight_update(self) -> None:
        """Make the model ready to take weights in the format of a checkpoint."""
        if self._prepares:
            return
        if self._is_half:  # whatever layers it has now: all of them are loaded again
            end_reload(self.model, self.model_config)
        self._is_half = True
        begin_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the staged version. vLLM's own asks for an accelerator, which a CPU has not."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def receive_weights(self, update_info: LoadInfo) -> None:
        """Load the staged version. Raises: WeightSyncError: another one is staged."""
        if self._prepares:
            self.staging.check(update_info.version)
        else:
            cast(Any, self.model).load_weights(self.staging.tensors(update_info.version))

    def finish_weight_update(self) -> None:
        """Let the layers process what they have loaded, or have what was prepared."""
        if self._prepares:
            assert self._prepared is not None, "a version is staged"
            self._prepared.swap()
            self._prepared = None
        else:
            end_reload(self.model, self.model_config)
            self._is_half = False

    def shutdown(self) -> None:
        """Leave the group."""
        self.staging.leave()


def register() -> None:
    """Make vLLM know the backend; once per process."""
    WeightTransferEngineFactory.register_engine(BACKEND, StagedTransferEngine)
