"""vLLM's CPU worker, made fit for CPUs with AMX tiles."""

import logging

from vllm.v1.worker.cpu_worker import CPUWorker

from common.amx import TilePermission, request_tiles

logger = logging.getLogger(__name__)


class TileWorker(CPUWorker):
    """vLLM's CPU worker, which asks for AMX tiles before anything of the model runs.

    Its bf16 attention uses them and nobody else asks, so it would die at the first token.
    """

    tile_permission: TilePermission | None = None  # None: not asked yet

    def init_device(self) -> None:
        """Ask for tiles, then do as vLLM does."""
        self.tile_permission = request_tiles()
        level = logging.WARNING if self.tile_permission == "refused" else logging.INFO
        logger.log(level, "AMX tiles: %s", self.tile_permission)
        super().init_device()

    def tiles(self) -> str:
        """Return what the kernel answered."""
        return str(self.tile_permission)
