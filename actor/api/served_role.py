"""A served engine as a role of a run: its address and its signs of life."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from common.stall.beacon import Beacon
from common.store.run_dir import RunDir

BEAT_S = 0.5  # Seconds between two reports of the event loop.


@dataclass(frozen=True, slots=True)
class ServedRole:
    """The part of a served engine in a run."""

    run_dir: RunDir
    role: str
    beacon: Beacon

    @contextlib.asynccontextmanager
    async def published(self, url: str) -> AsyncGenerator[None]:
        """Publish the address inside the context, and report that the event loop is alive."""
        self.run_dir.publish_address(self.role, url)
        beating = asyncio.create_task(self._report_alive())
        try:
            yield
        finally:
            beating.cancel()
            self.run_dir.forget_address(self.role)

    async def _report_alive(self) -> None:
        """Report once per interval that the event loop is alive."""
        while True:
            self.beacon.note("main", "serving")
            await asyncio.sleep(BEAT_S)
