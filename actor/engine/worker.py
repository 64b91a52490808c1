"""What runs inside the engine's worker processes: weights are received and loaded."""

import logging
from collections.abc import Iterator
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group

from actor.engine.adapter import load_adapter
from common.amx import TilePermission
from common.errors import WeightSyncError
from common.wire.codec import decode
from common.wire.collective import checksum, device_id, views
from common.wire.weight_group import TransferCancelled, WeightGroup
from common.wire.weight_messages import WeightsOffer

RELOAD_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"


class WeightReceiver:
    """Mixed into vLLM's worker (`worker_extension_cls`): takes weights over torch.distributed."""

    device: torch.device  # this and the next are the worker's own
    model_runner: Any
    vllm_config: VllmConfig
    _weight_group: WeightGroup

    def device_id(self) -> str:
        """Return the name of this worker's GPU, "" if it has none."""
        return device_id(self.device)

    def tiles(self) -> str:
        """Return what became of the request for AMX tiles; workers of GPUs make none."""
        return str(getattr(self, "tile_permission", TilePermission.NOT_NEEDED))

    def receive_weights(self, frames: list[bytes]) -> dict[str, str | bool]:
        """Take the place in the group that an encoded offer gives, receive the buffer, load it.

        Of several workers (tensor parallel) the first one receives and hands on to the others.

        Returns:
            {"error", "is_cancelled"}: an error means that the transfer failed, or was given up by
            the learner, and the old weights are untouched. Whatever is raised instead happened
            while loading and ends the engine: nobody knows then which weights it holds.
        """
        offer: WeightsOffer = decode(frames)
        workers = get_tp_group()
        buffer, reason, is_cancelled = None, "", False
        if workers.is_first_rank:
            try:
                buffer = self._receive(offer)
            except WeightSyncError as error:
                reason, is_cancelled = str(error), isinstance(error, TransferCancelled)
        if workers.world_size > 1:
            buffer = self._hand_on(buffer, offer.total_bytes)
        if buffer is not None:
            self._load(views(buffer, offer.tensors))
        return {"error": reason, "is_cancelled": is_cancelled}

    def _hand_on(self, buffer: torch.Tensor | None, num_bytes: int) -> torch.Tensor | None:
        """Return the first worker's buffer [num_bytes] uint8 on every worker, None if it failed."""
        workers = get_tp_group()
        has_come = torch.tensor([buffer is not None], dtype=torch.int32, device=self.device)
        if not workers.broadcast(has_come, src=0).item():
            return None
        if buffer is None:
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return workers.broadcast(buffer, src=0)

    def _receive(self, offer: WeightsOffer) -> torch.Tensor:
        """Return the received buffer [num_bytes] uint8.

        Raises: WeightSyncError: the broadcast failed, or the bytes are not those that were sent.
        """
        place = self.device if offer.backend == "nccl" else torch.device("cpu")
        buffer = torch.empty(offer.total_bytes, dtype=torch.uint8, device=place)
        if not hasattr(self, "_weight_group"):
            self._weight_group = WeightGroup()
        self._weight_group.receive(buffer, offer)
        received = checksum(buffer)
        if received != offer.checksum:
            raise WeightSyncError(f"checksum {received} is not the sender's {offer.checksum}")
        return buffer.to(self.device)

    def _load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        if self.model_runner.lora_config:
            load_adapter(self.model_runner, tensors, self.vllm_config)
            return
        # vLLM warns at every reload of layers that no checkpoint has weights for (rotary tables).
        logging.getLogger(RELOAD_LOGGER).setLevel(logging.ERROR)
        self.model_runner.reload_weights(weights_iterator=tensors)
        model = self.model_runner.get_model()
        head = getattr(model, "lm_head", None)
        is_tied = getattr(model.config, "tie_word_embeddings", False)
        if head is not None and is_tied and hasattr(head, "quant_method"):
            # A tied head keeps its own packed copy on CPU, which a reload leaves stale.
            head.quant_method.process_weights_after_loading(head)
