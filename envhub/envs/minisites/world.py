"""The resources shared by all episodes of a process: the local sites and the browser."""

from collections.abc import Mapping
from typing import Any

import aiohttp

from common.config.envs import BrowserOptions
from common.http.sessions import open_session
from envhub.env import EnvFailure
from envhub.envs.minisites.apps import SITES, make_app
from envhub.web.local_site import LocalBrowser
from envhub.web.session import SnapshotSettings, WebSession
from envhub.web.site_tasks.env import may_go, start_urls

SESSION_HEADER = "X-Longstride-Session"
CALL_TIMEOUT_S = 10.0


class LocalWorld:
    """The sites; each episode has its own copy."""

    def __init__(self, options: BrowserOptions) -> None:
        self._options = options
        self._local = LocalBrowser(options, make_app, tuple(SITES))
        self._num_opened = 0
        self._names: dict[WebSession, str] = {}

    async def open(self, task: Mapping[str, Any]) -> WebSession:
        """Return a browser session on a new copy of the sites, with the task's start page open.

        Raises: EnvFailure: there is no browser, or the sites do not respond.
        """
        browser = await self._local.started()
        self._num_opened += 1
        name = f"episode-{self._num_opened}"
        await self._call("reset", {"session": name, "seed": task.get("site_seed", 0)})
        context = await browser.open_context()
        await context.set_extra_http_headers({SESSION_HEADER: name})
        timeout_s = self._options.action_timeout_s
        session = WebSession(
            context, SnapshotSettings(), may_go=may_go(set(SITES)), action_timeout_s=timeout_s
        )
        self._names[session] = name
        try:
            await session.open(*start_urls(task))
        except EnvFailure:
            await self.close(session)
            raise
        return session

    async def close(self, session: WebSession) -> None:
        """Close an episode's browser session and drop its copy of the sites."""
        await session.close()
        await self._call("drop", {"session": self._names.pop(session)})

    async def _call(self, what: str, body: dict[str, object]) -> None:
        """Send a control request to the sites. Raises: EnvFailure."""
        url = f"http://{self._local.address}/__{what}__"
        timeout = aiohttp.ClientTimeout(total=CALL_TIMEOUT_S)
        try:
            async with (
                open_session(url, is_own=True, timeout=timeout) as http,
                http.post(url, json=body) as response,
            ):
                response.raise_for_status()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EnvFailure(f"the sites failed at {what}: {error}") from error

    async def stop(self) -> None:
        """Stop the browser and the sites."""
        await self._local.stop()
