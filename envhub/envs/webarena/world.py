"""The browser shared by all WebArena episodes of a process; it reaches only WebArena's sites."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from common.config.envs import EnvsSection
from envhub.env import EnvFailure
from envhub.envs.webarena import remote_sites
from envhub.web.browser import BrowserHost, host_rules
from envhub.web.session import SnapshotSettings, WebSession
from envhub.web.site_tasks.addresses import may_go, start_urls

SNAPSHOT = SnapshotSettings(quiet_ms=300, max_settle_ms=8000)


class RemoteWorld:
    """WebArena's sites, shared by all episodes; the browser reaches only their hosts."""

    def __init__(self, options: EnvsSection) -> None:
        self._options = options
        self._sites = options.webarena.sites
        hosts = frozenset(urlsplit(url).hostname or "" for url in self._sites.values())
        self._browser = BrowserHost(options.browser, host_rules({}, reachable=hosts))
        self._hosts = {urlsplit(url).netloc for url in self._sites.values()}

    async def open(self, task: Mapping[str, Any]) -> WebSession:
        """Return a browser session with the task's login and start pages.

        Raises: EnvFailure: there is no browser, or a site does not respond.
        """
        login = remote_sites.login_state(self._options.webarena, task["sites"])
        context = await self._browser.open_context(storage_state=login)
        session = WebSession(
            context,
            SNAPSHOT,
            may_go=may_go(self._hosts),
            action_timeout_s=self._options.browser.action_timeout_s,
        )
        try:
            await session.open(*start_urls(task))
        except EnvFailure:
            await session.close()
            raise
        return session

    async def close(self, session: WebSession) -> None:
        """Close an episode's browser session; its changes remain on the sites."""
        await session.close()

    async def stop(self) -> None:
        """Stop the browser."""
        await self._browser.stop()
