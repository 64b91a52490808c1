"""Serves an ASGI application inside this process, on a port of loopback that is free."""

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from envhub.env import EnvFailure

logger = logging.getLogger(__name__)
START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 3.0


class _Server(uvicorn.Server):
    """A server that leaves the signals to the process it lives in."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class LocalSite:
    """An application answering at `address`, `127.0.0.1:<port>`, until `stop`."""

    def __init__(self, app: Any) -> None:
        # The protocol is named, or the server would not send small answers at once.
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.bind(("127.0.0.1", 0))
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="on", timeout_graceful_shutdown=1
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"

    async def start(self) -> None:
        """Returns when requests are answered.

        Raises:
            EnvFailure: the application did not start.
        """
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        async with asyncio.timeout(START_TIMEOUT_S):
            while not self._server.started:
                if self._task.done():
                    raise EnvFailure(f"the local site did not start: {self._task.exception()}")
                await asyncio.sleep(0.005)
        logger.info("local site started address=%s", self.address)

    async def stop(self) -> None:
        """Ends the server; open connections are cut after a second."""
        if self._task is None:
            return
        self._server.should_exit = True
        await asyncio.wait([self._task], timeout=STOP_TIMEOUT_S)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._socket.close()
