"""ASGI applications served inside this process, and a browser that reaches only these."""

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import uvicorn

from common.config.envs import BrowserOptions
from common.host.loopback import family_of, loopback
from common.http.serving import EmbeddedServer, Refusals, limited_protocol
from common.wire.addresses import bracketed
from envhub.env import EnvFailure
from envhub.web.browser import BrowserHost, host_rules

logger = logging.getLogger(__name__)
START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 3.0


class LocalSite:
    """Serves an application at `address`, `127.0.0.1:<port>` or `[::1]:<port>`, until `stop`."""

    def __init__(self, app: Any, *, start_timeout_s: float = START_TIMEOUT_S) -> None:
        """Bind a free port. `start_timeout_s` limits the start of the application."""
        # asyncio sets TCP_NODELAY only if the protocol is given. Without it, small answers are
        # delayed.
        host = loopback()
        self._socket = socket.socket(family_of(host), socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.bind((host, 0))
        config = uvicorn.Config(
            app,
            http=limited_protocol(Counter(), Refusals()),
            log_config=None,
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=1,
        )
        self._server = EmbeddedServer(config)
        self._start_timeout_s = start_timeout_s
        self._task: asyncio.Task[None] | None = None
        self.address = f"{bracketed(host)}:{self._socket.getsockname()[1]}"

    async def start(self) -> None:
        """Start the server and return once it accepts requests.

        Raises: EnvFailure: the application failed, or did not start in time.
        """
        self._task = asyncio.create_task(self._serve())
        try:
            async with asyncio.timeout(self._start_timeout_s):
                while not self._server.started and not self._task.done():
                    await asyncio.sleep(0.005)
        except TimeoutError as error:
            await self._end()
            text = f"the local site did not start within {self._start_timeout_s:g} s"
            raise EnvFailure(text) from error
        if self._task.done():
            self._socket.close()
            await self._task
        logger.info("local site started address=%s", self.address)

    async def _serve(self) -> None:
        """Run the server until it stops. Raises: EnvFailure: the application did not start."""
        try:
            await self._server.serve(sockets=[self._socket])
        except SystemExit as error:  # uvicorn exits, which would end the whole process.
            raise EnvFailure("the application of the local site failed at its start") from error

    async def stop(self) -> None:
        """Stop the server; open connections are closed after a second."""
        if self._task is None:
            return
        self._server.should_exit = True
        await asyncio.wait([self._task], timeout=STOP_TIMEOUT_S)
        await self._end()

    async def _end(self) -> None:
        """Cancel the server and release its port."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._socket.close()


class LocalBrowser:
    """An application under host names, and a browser that visits it; both start on first use."""

    def __init__(
        self, options: BrowserOptions, make_app: Callable[[], Any], hosts: Sequence[str]
    ) -> None:
        self._options = options
        self._make_app = make_app
        self._hosts = hosts
        self._lock = asyncio.Lock()
        self._site: LocalSite | None = None
        self._browser: BrowserHost | None = None

    @property
    def address(self) -> str:
        """Host and port of the application; it must be started."""
        assert self._site is not None, "the application is not started"
        return self._site.address

    async def started(self) -> BrowserHost:
        """Return the browser; the first call starts the application.

        Raises: EnvFailure: the application did not start.
        """
        async with self._lock:
            if self._browser is None:
                self._site = LocalSite(self._make_app())
                await self._site.start()
                rules = host_rules(dict.fromkeys(self._hosts, self._site.address))
                self._browser = BrowserHost(self._options, rules)
            return self._browser

    async def stop(self) -> None:
        """Stop the browser and the application."""
        if self._browser is not None:
            await self._browser.stop()
        if self._site is not None:
            await self._site.stop()
