"""Our backend of vLLM's weight transfer: what was staged is loaded, layer by layer."""

import logging
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from vllm.distributed import get_tp_group
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

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
    """

    init_info_cls: ClassVar[type[OfferInfo]] = OfferInfo  # pyright: ignore
    update_info_cls: ClassVar[type[LoadInfo]] = LoadInfo  # pyright: ignore

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.staging = Staging(self.device)

    def init_transfer_engine(self, init_info: OfferInfo) -> None:
        """Begin to receive an offered version; of several workers each has a rank of its own."""
        offer: WeightsOffer = decode(init_info.offer)
        own_rank = offer.rank + get_tp_group().rank_in_group
        self.staging.begin(replace(offer, rank=own_rank))

    def start_weight_update(self) -> None:
        """Make the model ready to take weights in the format of a checkpoint."""
        # vLLM warns at every reload of layers that no checkpoint has weights for (rotary tables).
        logging.getLogger(RELOAD_LOGGER).setLevel(logging.ERROR)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the staged version. vLLM's own asks for an accelerator, which a CPU has not."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def receive_weights(self, update_info: LoadInfo) -> None:
        """Load the staged version. Raises: WeightSyncError: another one is staged."""
        cast(Any, self.model).load_weights(self.staging.tensors(update_info.version))

    def finish_weight_update(self) -> None:
        """Let the layers process what they have loaded."""
        finalize_layerwise_reload(self.model, self.model_config)
        head = getattr(self.model, "lm_head", None)
        is_tied = getattr(self.model.config, "tie_word_embeddings", False)
        if head is not None and is_tied and hasattr(head, "quant_method"):
            # A tied head keeps its own packed copy on CPU, which a reload leaves stale.
            head.quant_method.process_weights_after_loading(head)

    def shutdown(self) -> None:
        """Leave the group."""
        self.staging.leave()


def register() -> None:
    """Make vLLM know the backend; once per process."""
    WeightTransferEngineFactory.register_engine(BACKEND, StagedTransferEngine)
