"""Our backend of vLLM's weight transfer: loads the staged version layer by layer."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
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

from actor.engine.notices import CAST_LOGGER
from actor.engine.prepared import Prepared, begin_reload, can_prepare, end_reload
from actor.weights.stage import Staging
from common.weights.messages import WeightsOffer
from common.wire.codec import decode

BACKEND = "longstride"
RELOAD_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"


@dataclass
class OfferInfo(WeightTransferInitInfo):
    """The version to stage."""

    offer: list[bytes]  # An encoded WeightsOffer. Its rank is that of the engine's first worker.


@dataclass
class LoadInfo(WeightTransferUpdateInfo):
    """The version to load; it must be the staged one."""

    version: int


class StagedTransferEngine(WeightTransferEngine[OfferInfo, LoadInfo]):
    """Stages a version while the engine generates, and loads it while the engine is paused.

    `init_transfer_engine` joins the receivers of a version and returns at once. If the model
    supports it, the version is prepared during generation, and the load only swaps pointers.
    """

    init_info_cls: ClassVar[type[OfferInfo]] = OfferInfo  # pyright: ignore
    update_info_cls: ClassVar[type[LoadInfo]] = LoadInfo  # pyright: ignore

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # vLLM warns at every reload about layers without weights in the checkpoint (rotary tables).
        logging.getLogger(RELOAD_LOGGER).setLevel(logging.ERROR)
        # It also warns about vectors, which versions have in fp32 for every engine.
        logging.getLogger(CAST_LOGGER).setLevel(logging.ERROR)
        self._prepares = can_prepare(self.model, self.vllm_config, self.device)
        self._prepared: Prepared | None = None
        self._is_half = False  # An update began and did not end.
        self.staging = Staging(self.device, self._prepare if self._prepares else None)

    def init_transfer_engine(self, init_info: OfferInfo) -> None:
        """Begin to receive an offered version, of which several workers may share one copy."""
        offer: WeightsOffer = decode(init_info.offer)
        self.staging.begin(offer.of_worker(get_tp_group().rank_in_group))

    def _prepare(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Prepare a staged version, in the staging thread."""
        if self._prepared is not None:
            self._prepared.release()  # The previous version was never loaded.
        self._prepared = Prepared(self.model, self.vllm_config)
        self._prepared.load(tensors)

    def start_weight_update(self) -> None:
        """Make the model ready to take weights in the format of a checkpoint."""
        if self._prepares:
            return
        if self._is_half:  # Some layers may hold new weights. All layers are loaded again.
            end_reload(self.model, self.model_config)
        self._is_half = True
        begin_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the staged version. vLLM's own method needs an accelerator and fails on a CPU."""
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
        """Let the layers process the loaded weights, or swap in the prepared version."""
        if self._prepares:
            assert self._prepared is not None, "a version is staged"
            self._prepared.swap()
            self._prepared = None
        else:
            end_reload(self.model, self.model_config)
            self._is_half = False
        self.staging.memory.release()

    def shutdown(self) -> None:
        """Leave the weight group."""
        self.staging.leave()


def register() -> None:
    """Register the backend with vLLM; once per process."""
    WeightTransferEngineFactory.register_engine(BACKEND, StagedTransferEngine)
