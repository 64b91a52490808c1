"""Our extension of vLLM's worker processes."""

from typing import Any, cast

import torch
from vllm.config import VllmConfig

from actor.engine.adapter import load_adapter
from actor.engine.load import StagedTransferEngine, count_cast_weights, register
from actor.engine.process_watch import end_with_owner
from actor.weights.stage import Staging
from common.host.machine import TilePermission
from common.stall.stacks import tell_stacks
from common.weights.transport import device_id

cast_weights = count_cast_weights()
register()  # Runs when the module is imported, at the start of the worker process.
end_with_owner()
tell_stacks()


class WorkerExtension:
    """Mixed into vLLM's worker (`worker_extension_cls`): calls that need the worker's state."""

    device: torch.device  # These four attributes belong to vLLM's worker.
    model_runner: Any
    vllm_config: VllmConfig
    weight_transfer_engine: Any

    def device_id(self) -> str:
        """Return the name of this worker's GPU, "" if it has none."""
        return device_id(self.device)

    def tiles(self) -> str:
        """Return the result of the request for AMX tiles; GPU workers make none."""
        return str(getattr(self, "tile_permission", TilePermission.NOT_NEEDED))

    def compile_s(self) -> float:
        """Return the seconds of the start that were spent on compilation."""
        return float(self.vllm_config.compilation_config.compilation_time)

    def num_cast_weights(self) -> int:
        """Return the number of weights whose dtype in the checkpoint is not the engine's."""
        return cast_weights.num_seen

    def staged(self) -> dict[str, Any]:
        """Return the state of this worker's staging, see `Staged`."""
        return self._staging.state().as_dict()

    def free_staging(self) -> None:
        """Free the staging buffer while the engine sleeps."""
        self._staging.free()

    def give_up_staging(self) -> None:
        """Cancel the running transfer. The weights stay unchanged."""
        self._staging.give_up()

    def forget_update(self) -> None:
        """Reset an incomplete update, so that the worker can begin a new one."""
        self._weight_update_active = False
        self.weight_transfer_engine.reset_weight_update_target()

    def load_staged_adapter(self, version: int) -> None:
        """Replace the adapter by the staged one.

        vLLM's own weight update is not used, because it ends by removing all adapters.
        """
        load_adapter(self.model_runner, self._staging.tensors(version), self.vllm_config)
        self._staging.memory.release()

    @property
    def _staging(self) -> Staging:
        return cast(StagedTransferEngine, self.weight_transfer_engine).staging
