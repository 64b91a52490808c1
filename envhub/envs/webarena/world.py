"""What the WebArena episodes of one process share: our own sites or WebArena's, and the browser."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from common.config.envs import EnvsSection
from envhub.env import EnvFailure
from envhub.envs.webarena import remote_sites
from envhub.envs.webarena.sites.apps import SITES, make_app
from envhub.web.browser import BrowserHost, host_rules
from envhub.web.local_site import LocalSite
from envhub.web.session import Look, WebSession

logger = logging.getLogger(__name__)
SESSION_HEADER = "X-Longstride-Session"
CALL_TIMEOUT_S = 10.0
LOCAL_LOOK = Look()
REMOTE_LOOK = Look(quiet_ms=300, max_settle_ms=8000)


class LocalWorld:
    """Our own sites, one database per episode, served inside this process."""

    def __init__(self, options: EnvsSection) -> None:
        self._options = options
        self._lock = asyncio.Lock()
        self._site: LocalSite | None = None
        self._browser: BrowserHost | None = None
        self._http: aiohttp.ClientSession | None = None
        self._num_opened = 0
        self._names: dict[WebSession, str] = {}

    async def open(self, task: dict[str, Any]) -> WebSession:
        """Returns a browser session on a fresh copy of the sites, with the task's first page open.

        Raises:
            EnvFailure: no browser, or the sites do not answer.
        """
        browser = await self._started()
        self._num_opened += 1
        name = f"episode-{self._num_opened}"
        await self._call("reset", {"session": name, "seed": task.get("site_seed", 0)})
        context = await browser.open_context()
        await context.set_extra_http_headers({SESSION_HEADER: name})
        session = WebSession(
            context,
            LOCAL_LOOK,
            may_go=may_go(set(SITES)),
            action_timeout_s=self._options.browser.action_timeout_s,
        )
        self._names[session] = name
        try:
            await session.open(*start_urls(task))
        except EnvFailure:
            await self.close(session)
            raise
        return session

    async def close(self, session: WebSession) -> None:
        """Ends an episode's browser session and forgets its copy of the sites."""
        await session.close()
        await self._call("drop", {"session": self._names.pop(session)})

    async def _call(self, what: str, body: dict[str, object]) -> None:
        assert self._http is not None
        assert self._site is not None
        try:
            url = f"http://{self._site.address}/__{what}__"
            async with self._http.post(url, json=body) as response:
                response.raise_for_status()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EnvFailure(f"the sites failed at {what}: {error}") from error

    async def _started(self) -> BrowserHost:
        async with self._lock:
            if self._browser is None:
                self._site = LocalSite(make_app())
                await self._site.start()
                timeout = aiohttp.ClientTimeout(total=CALL_TIMEOUT_S)
                self._http = aiohttp.ClientSession(timeout=timeout)
                rules = host_rules(dict.fromkeys(SITES, self._site.address))
                self._browser = BrowserHost(self._options.browser, rules)
            return self._browser

    async def stop(self) -> None:
        """Ends the browser and the sites."""
        if self._browser is not None:
            await self._browser.stop()
        if self._http is not None:
            await self._http.close()
        if self._site is not None:
            await self._site.stop()


class RemoteWorld:
    """WebArena's sites, which all episodes share; only their hosts can be reached."""

    def __init__(self, options: EnvsSection) -> None:
        self._options = options
        self._sites = remote_sites.configured(options.webarena)
        hosts = frozenset(urlsplit(url).hostname or "" for url in self._sites.values())
        self._browser = BrowserHost(options.browser, host_rules({}, reachable=hosts))
        self._hosts = {urlsplit(url).netloc for url in self._sites.values()}

    async def open(self, task: dict[str, Any]) -> WebSession:
        """Returns a browser session, logged in as the task wants it, with its first pages open.

        Raises:
            EnvFailure: no browser, or a site does not answer.
        """
        login = remote_sites.login_state(self._options.webarena, task["sites"])
        context = await self._browser.open_context(storage_state=login)
        session = WebSession(
            context,
            REMOTE_LOOK,
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
        """Ends an episode's browser session; the sites keep what it has changed."""
        await session.close()

    async def stop(self) -> None:
        """Ends the browser."""
        await self._browser.stop()


def start_urls(task: dict[str, Any]) -> list[str]:
    """Returns the addresses of the tabs that a task begins with."""
    return [url.strip() for url in task["start_url"].split("|AND|")]


def may_go(hosts: set[str]) -> Callable[[str], bool]:
    """Returns a test of whether an address lies on one of these hosts, ports included."""

    def test(url: str) -> bool:
        try:
            parts = urlsplit(url)
        except ValueError:
            return False
        return parts.scheme in ("http", "https") and parts.netloc.lower() in hosts

    return test
