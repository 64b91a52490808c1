"""vLLM's CPU worker with support for AMX tiles, a single adapter and records of experts."""

from typing import Any

import numpy as np
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.worker.cpu_worker import CPUWorker

from actor.engine.routing import RECORDS, ExpertRecorder
from common.amx import TilePermission, request_tiles

ONE_ADAPTER = "actor.engine.adapter.OneAdapter"


class TileWorker(CPUWorker):
    """vLLM's CPU worker, which requests AMX tiles before any code of the model runs.

    vLLM's bf16 attention uses tiles but does not request them. Without a request the process would
    crash at the first token.
    """

    tile_permission: TilePermission | None = None  # None: not requested yet.
    experts: ExpertRecorder | None = None  # None: experts are not recorded.

    def init_device(self) -> None:
        self.tile_permission = request_tiles()
        if self.vllm_config.lora_config is not None:
            CpuPlatform.get_punica_wrapper = classmethod(lambda _: ONE_ADAPTER)  # pyright: ignore
            _keep_cpu_experts()
        super().init_device()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        options: Any = self.vllm_config.additional_config
        if options and options.get(RECORDS):
            self.experts = ExpertRecorder(self.model_runner, self.vllm_config)

    def execute_model(self, scheduler_output: Any) -> Any:
        made = super().execute_model(scheduler_output)
        if self.experts is not None:
            self.experts.record(self.model_runner, scheduler_output)
        return made

    def take_experts(self, request: str) -> list[Any]:
        """Return the choices of a finished request: bytes, shape and dtype."""
        assert self.experts is not None
        found: np.ndarray = self.experts.take(request)
        return [found.tobytes(), list(found.shape), found.dtype.name]


def _keep_cpu_experts() -> None:
    """Let experts compute by the CPU's kernels also beside adapters of other layers.

    vLLM (0.32) chooses Triton's kernels for all experts of an engine with adapters, and they need a
    GPU. Published adapters never change experts, see `LoraSection.is_merged`.
    """
    place: Any = unquantized_fused_moe_method
    select = place.select_unquantized_moe_backend

    def select_for_cpu(moe_config: Any) -> Any:
        moe_config.is_lora_enabled = False
        return select(moe_config)

    place.select_unquantized_moe_backend = select_for_cpu
