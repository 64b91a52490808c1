"""What runs inside the engine's worker processes beside vLLM's own."""

from typing import Any, cast

import torch
from vllm.config import VllmConfig

from actor.engine.adapter import load_adapter
from actor.engine.process_watch import end_with_owner
from actor.engine.staging import Staging
from actor.engine.transfer_engine import StagedTransferEngine, register
from common.amx import TilePermission
from common.stall.stacks import tell_stacks
from common.wire.collective import device_id

register()  # importing this module is the first that a worker does
end_with_owner()
tell_stacks()


class WorkerExtension:
    """Mixed into vLLM's worker (`worker_extension_cls`): what only a worker knows."""

    device: torch.device  # this and the next three are the worker's own
    model_runner: Any
    vllm_config: VllmConfig
    weight_transfer_engine: Any

    def device_id(self) -> str:
        """Return the name of this worker's GPU, "" if it has none."""
        return device_id(self.device)

    def tiles(self) -> str:
        """Return what became of the request for AMX tiles; workers of GPUs make none."""
        return str(getattr(self, "tile_permission", TilePermission.NOT_NEEDED))

    def staged(self) -> dict[str, Any]:
        """Return what became of the version that this worker was offered, see `Staged`."""
        return self._staging.state().as_dict()

    def give_up_staging(self) -> None:
        """Let the transfer that runs end; the weights stay as they are."""
        self._staging.give_up()

    def forget_update(self) -> None:
        """Make the worker ready for a whole update after one that ended in the middle."""
        self._weight_update_active = False
        self.weight_transfer_engine.reset_weight_update_target()

    def load_staged_adapter(self, version: int) -> None:
        """Put a staged adapter in the place of the one before.

        Not by vLLM's weight update, which ends with removing every adapter.
        """
        load_adapter(self.model_runner, self._staging.tensors(version), self.vllm_config)

    @property
    def _staging(self) -> Staging:
        return cast(StagedTransferEngine, self.weight_transfer_engine).staging
