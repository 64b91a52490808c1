"""vLLM's CPU worker, made fit for CPUs with AMX tiles, and for one adapter."""

from vllm.platforms.cpu import CpuPlatform
from vllm.v1.worker.cpu_worker import CPUWorker

from common.amx import TilePermission, request_tiles

ONE_ADAPTER = "actor.engine.adapter.OneAdapter"


class TileWorker(CPUWorker):
    """vLLM's CPU worker, which asks for AMX tiles before anything of the model runs.

    Its bf16 attention uses them and nobody else asks, so it would die at the first token.
    """

    tile_permission: TilePermission | None = None  # None: not asked yet

    def init_device(self) -> None:
        self.tile_permission = request_tiles()
        if self.vllm_config.lora_config is not None:
            CpuPlatform.get_punica_wrapper = classmethod(lambda _: ONE_ADAPTER)  # pyright: ignore
        super().init_device()
