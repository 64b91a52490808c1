"""vLLM's CPU worker, made fit for CPUs with AMX tiles."""

from vllm.v1.worker.cpu_worker import CPUWorker

from common.amx import TilePermission, request_tiles


class TileWorker(CPUWorker):
    """vLLM's CPU worker, which asks for AMX tiles before anything of the model runs.

    Its bf16 attention uses them and nobody else asks, so it would die at the first token.
    """

    tile_permission: TilePermission | None = None  # None: not asked yet

    def init_device(self) -> None:
        self.tile_permission = request_tiles()
        super().init_device()
