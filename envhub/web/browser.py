"""The Chromium of a process: found on the machine, started on first use, restarted when dead."""

import asyncio
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace

from playwright.async_api import Browser, BrowserContext, Playwright, async_playwright
from playwright.async_api import Error as BrowserError

from common.config.envs import BrowserOptions
from envhub.env import EnvFailure, EnvSpec, Isolation
from envhub.tables import read_text

logger = logging.getLogger(__name__)
BINARIES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 5.0
VIEWPORT = (1280, 720)


PAGE_SCRIPT = "\n".join(read_text(__file__, f"{name}.js") for name in ("settle", "page", "hands"))
CLOCK_SCRIPT = read_text(__file__, "clock.js")
FLAGS = tuple(read_text(__file__, "flags.txt").split())


def find_browser(options: BrowserOptions) -> str:
    """Return the path of the browser; "" if there is none."""
    if options.executable:
        return options.executable if os.access(options.executable, os.X_OK) else ""
    return next((path for name in BINARIES if (path := shutil.which(name))), "")


def check_browser(options: BrowserOptions) -> list[str]:
    """Return an error line if this machine has no browser; [] if it has one."""
    if find_browser(options):
        return []
    if options.executable:
        return [f"envs.browser.executable={options.executable!r} is not an executable program"]
    names = ", ".join(BINARIES[:3])
    return [
        f"no browser: none of {names} is on the PATH; install Chromium (apt-get install chromium) "
        "or set envs.browser.executable"
    ]


def browser_spec(spec: EnvSpec, options: BrowserOptions) -> EnvSpec:
    """Return the catalogue entry of a browser environment. One worker holds all its episodes."""
    return replace(
        spec,
        isolation=Isolation.WORKER,
        sessions_per_worker=options.max_sessions,
        max_workers=1,
        sessions_key="envs.browser.max_sessions",
        worker_memory_bytes=8 << 30,
        step_timeout_s=60.0,
    )


def host_rules(hosts: Mapping[str, str], *, reachable: frozenset[str] = frozenset()) -> str:
    """Return Chromium's resolver rules: `hosts` map to addresses, `reachable` resolve normally.

    Every other host is unresolvable in the browser, for pages and for agents.
    """
    rules = [f"MAP {host} {address}" for host, address in hosts.items()]
    exceptions = [f"EXCLUDE {host}" for host in sorted(reachable)]
    return ", ".join([*rules, "MAP * ~NOTFOUND", *exceptions])


class BrowserHost:
    """Starts the browser for the first context, and again after it has died.

    Example: two sessions have a context each, and Chromium is killed. Their next calls raise
    EnvFailure (`is_alive` of their browser is False). The next new session starts a new browser.
    """

    def __init__(self, options: BrowserOptions, rules: str) -> None:
        self._options = options
        self._rules = rules
        self._lock = asyncio.Lock()
        self._playwright: Playwright | None = None
        self._browser: Browser | None = None
        self.num_starts = 0

    async def open_context(
        self, *, clock: bool = False, storage_state: str | None = None
    ) -> BrowserContext:
        """Return a new context with its own cookies, cache and storage, and reduced motion.

        Args:
            clock: replace the pages' clock by a virtual clock, which advances on command only.
            storage_state: file of initial cookies; None: no cookies.

        Raises: EnvFailure: there is no browser, or it does not respond.
        """
        browser = await self._live_browser()
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                context = await browser.new_context(
                    viewport={"width": VIEWPORT[0], "height": VIEWPORT[1]},
                    storage_state=storage_state,
                    locale="en-US",
                    timezone_id="UTC",
                    accept_downloads=False,
                    service_workers="block",
                    reduced_motion="reduce",
                )
                await context.add_init_script(PAGE_SCRIPT)
                if clock:
                    await context.add_init_script(CLOCK_SCRIPT)
        except (BrowserError, TimeoutError) as error:
            raise EnvFailure(f"the browser created no context: {first_line(error)}") from error
        return context

    async def _live_browser(self) -> Browser:
        """Return the browser; start it again if it has died."""
        async with self._lock:
            if self._browser is not None and self._browser.is_connected():
                return self._browser
            executable = find_browser(self._options)
            if not executable:
                raise EnvFailure(check_browser(self._options)[0])
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    self._browser = await self._launch(executable)
            except (BrowserError, TimeoutError) as error:
                raise EnvFailure(f"{executable} did not start: {first_line(error)}") from error
            self.num_starts += 1
            logger.info("browser started path=%s starts=%d", executable, self.num_starts)
            return self._browser

    async def _launch(self, executable: str) -> Browser:
        """Start the browser."""
        if self._playwright is None:
            self._playwright = await async_playwright().start()
        flags = [*FLAGS, f"--host-resolver-rules={self._rules}"]
        if os.geteuid() == 0:
            flags.append("--no-sandbox")
        return await self._playwright.chromium.launch(
            executable_path=executable, args=flags, headless=True
        )

    async def stop(self) -> None:
        """Stop the browser. A browser that does not respond ends with the process."""
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                if self._browser is not None:
                    await self._browser.close()
                if self._playwright is not None:
                    await self._playwright.stop()
        except (BrowserError, TimeoutError) as error:
            logger.warning("browser did not stop error=%s", first_line(error))
        self._browser = self._playwright = None


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type if the text is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
