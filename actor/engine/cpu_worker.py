"""vLLM's CPU worker with support for AMX tiles and for a single adapter."""

from vllm.platforms.cpu import CpuPlatform
from vllm.v1.worker.cpu_worker import CPUWorker

from common.amx import TilePermission, request_tiles

ONE_ADAPTER = "actor.engine.adapter.OneAdapter"


class TileWorker(CPUWorker):
    """vLLM's CPU worker, which requests AMX tiles before any code of the model runs.

    vLLM's bf16 attention uses tiles but does not request them. Without a request the process would
    crash at the first token.
    """

    tile_permission: TilePermission | None = None  # None: not requested yet.

    def init_device(self) -> None:
        self.tile_permission = request_tiles()
        if self.vllm_config.lora_config is not None:
            CpuPlatform.get_punica_wrapper = classmethod(lambda _: ONE_ADAPTER)  # pyright: ignore
        super().init_device()
