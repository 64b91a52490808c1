"""One episode's browser session: a context, its tabs, and the actions in them."""

import asyncio
import json
import logging
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from playwright.async_api import BrowserContext, Dialog, Page, Request, Response
from playwright.async_api import Error as BrowserError
from playwright.async_api import TimeoutError as BrowserTimeout

from envhub.env import EnvFailure
from envhub.web.actions import InvalidAction, WebAction, WebActionType
from envhub.web.browser import VIEWPORT, first_line
from envhub.web.performing import act
from envhub.web.tree import Snapshot, read_snapshot

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")
MAX_RETRIES = 5
MAX_TABS = 8
JPEG_QUALITY = 60
GRACE_S = 10.0
SERVER_ERROR = 500  # From this status on, the site has failed; a missing page is an answer.
# Statuses by which a gateway reports that its site is away. The agent of an outside site may cause
# another error of its server, and receives the page.
AWAY = frozenset((502, 503, 504))
NEW_TAB_TIMEOUT_S = 2.0
FAR_CORNER = (VIEWPORT[0] - 1, VIEWPORT[1] - 1)
# Beginnings of the browser's reasons why a page did not load: its site is away.
NO_ANSWER = tuple(
    f"net::ERR_{name}"
    for name in ("CONNECTION", "EMPTY_RESPONSE", "TIMED_OUT", "ADDRESS", "NAME", "NETWORK")
)
# Parts of browser errors about a page that was navigated away or closed while it was read.
GONE_WORDS = ("Execution context was destroyed", "navigat", "Cannot find context", "detached")


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSettings:
    """Options for reading pages.

    Attributes:
        max_settle_ms: longest wait until a page settles; then it is read in any state.
        quiet_ms: required time without a change of the document; 0: none.
        advance_ms: advance of a page's virtual clock before each snapshot, if it has one.
        deep: include drawings, listeners and class names, for pages without text.
        skip: ids of elements that are left out.
    """

    max_settle_ms: int = 5000
    quiet_ms: int = 0
    advance_ms: int = 0
    deep: bool = False
    skip: tuple[str, ...] = ()


class WebSession:
    """The tabs of one context. Calls must not overlap.

    Args:
        may_go: returns whether `goto` may open an address. If the site of such an address does not
            respond, the session fails; an agent's way out of the sites is an answer.
        is_own_site: the sites run in this process, so any error of a server fails the session.
    """

    def __init__(
        self,
        context: BrowserContext,
        settings: SnapshotSettings,
        *,
        may_go: Callable[[str], bool],
        action_timeout_s: float,
        is_own_site: bool = False,
    ) -> None:
        self.context = context
        self._is_own_site = is_own_site
        self._settings = settings
        self._may_go = may_go
        self._timeout_s = action_timeout_s
        self.tabs: list[Page] = []  # Tabs in the order in which they were opened.
        self._current: Page | None = None
        self._has_new_tab = asyncio.Event()
        self.dialogs: list[str] = []
        self._is_aside = False
        self._site_failure = ""
        context.on("page", self._add_tab)
        context.on("requestfailed", self._record_failure)
        context.on("response", self._record_status)
        context.on("dialog", self._accept)

    @property
    def page(self) -> Page:
        """The tab that receives actions."""
        assert self._current is not None, "a session is used before a tab is open"
        return self._current

    def _add_tab(self, page: Page) -> None:
        """Register a tab that the page or the agent has opened."""
        if self._is_aside:
            return
        page.set_default_timeout(self._timeout_s * 1000)
        page.on("close", lambda _: self._remove_tab(page))
        self.tabs.append(page)
        self._current = page
        self._has_new_tab.set()

    def _remove_tab(self, page: Page) -> None:
        """Remove a closed tab; the last remaining one becomes current."""
        if page in self.tabs:
            self.tabs.remove(page)
        if self._current is page and self.tabs:
            self._current = self.tabs[-1]

    def _record_failure(self, request: Request) -> None:
        """Record a page of the sites that did not load because its site does not respond."""
        reason = request.failure or ""
        is_page = request.is_navigation_request() and self._may_go(request.url)
        if is_page and reason.startswith(NO_ANSWER):
            self._site_failure = f"{request.url} does not respond: {reason}"

    def _record_status(self, response: Response) -> None:
        """Record a response that means that a site has failed."""
        is_page = response.request.is_navigation_request() and self._may_go(response.url)
        is_away = is_page and response.status in AWAY
        if is_away or (self._is_own_site and response.status >= SERVER_ERROR):
            self._site_failure = f"{response.url} answers with status {response.status}"

    async def _accept(self, dialog: Dialog) -> None:
        """Accept a dialog, and keep its text."""
        self.dialogs.append(f"{dialog.type}: {dialog.message}")
        await dialog.accept()

    @property
    def is_alive(self) -> bool:
        """Whether the browser is connected and a tab is open."""
        browser = self.context.browser
        return browser is not None and browser.is_connected() and bool(self.tabs)

    async def open(self, *urls: str) -> None:
        """Open a tab for each address and make the first one current. An open tab is reused.

        Raises: EnvFailure: an address does not respond.
        """
        self._site_failure = ""
        tabs = list(self.tabs)
        for url in urls:
            page = tabs.pop(0) if tabs else await self._guard(self.context.new_page())
            try:
                # Move the mouse away, so that nothing on the next page has the hover state.
                await self._guard(page.mouse.move(*FAR_CORNER))
            except BrowserError as error:
                raise EnvFailure(f"{url} cannot be opened: {first_line(error)}") from error
            await self._visit(page, url)
        self._current = self.tabs[-len(urls)]

    async def _visit(self, page: Page, url: str) -> None:
        """Load an address in a tab. Raises: EnvFailure: it does not respond, or with an error."""
        going = page.goto(url, wait_until="load", timeout=self._timeout_s * 2000)
        try:
            response = await self._guard(going)
        except BrowserError as error:
            raise EnvFailure(f"{url} cannot be opened: {first_line(error)}") from error
        if response is not None and response.status >= SERVER_ERROR:
            raise EnvFailure(f"{url} cannot be opened: status {response.status}")

    async def picture(self) -> str:
        """Return a screenshot of the current tab as a data URL.

        Raises: EnvFailure: the screenshot failed.
        """
        try:
            content = await self._guard(self.page.screenshot(type="jpeg", quality=JPEG_QUALITY))
        except BrowserError as error:
            raise EnvFailure(f"no picture of the page: {first_line(error)}") from error
        return f"data:image/jpeg;base64,{b64encode(content).decode()}"

    @asynccontextmanager
    async def aside(self, url: str) -> AsyncIterator[Page]:
        """Open an address in a temporary tab that is hidden from the agent.

        Raises: EnvFailure: it does not respond.
        """
        self._is_aside = True
        try:
            page = await self._guard(self.context.new_page())
        finally:
            self._is_aside = False
        try:
            await self._visit(page, url)
            yield page
        except BrowserTimeout as error:
            raise EnvFailure(f"{url} does not answer: {first_line(error)}") from error
        finally:
            await self._guard(page.close())

    async def run(self, script: str, argument: object = None) -> object:
        """Run a trusted script in the current page and return its result.

        Raises: EnvFailure: it raised an error, or the page is gone.
        """
        try:
            return await self._guard(self.page.evaluate(script, argument))
        except BrowserError as error:
            raise EnvFailure(f"a script failed on {self.page.url}: {first_line(error)}") from error

    async def snapshot(
        self, *, advance_ms: int | None = None, has_places: bool = False
    ) -> Snapshot:
        """Return a snapshot of the current tab after it has settled.

        Args:
            advance_ms: advance of the page's virtual clock; None: the session's `advance_ms`.
            has_places: include the position of every node.

        Raises: EnvFailure: the page cannot be read, or its site has failed.
        """
        options = {
            "maxMs": self._settings.max_settle_ms,
            "quietMs": self._settings.quiet_ms,
            "advanceMs": self._settings.advance_ms if advance_ms is None else advance_ms,
            "places": has_places,
            "deep": self._settings.deep,
            "skip": list(self._settings.skip),
        }
        for _ in range(MAX_RETRIES):
            page = self.page
            try:
                text = await self._guard(page.evaluate("o => __ls.snapshot(o)", options))
            except BrowserError as error:
                if not _is_leaving(error) or page.is_closed():
                    raise EnvFailure(f"the page cannot be read: {first_line(error)}") from error
                await self._loaded(page)
                continue
            if self._site_failure:
                raise EnvFailure(self._site_failure)
            message = json.loads(text)
            if message["opened"]:
                await self._opened()
            if page is self.page and not message["isLeaving"]:
                return read_snapshot(message)
        raise EnvFailure(f"the page still changes after {MAX_RETRIES} attempts")

    async def _opened(self) -> None:
        """Wait for the tab that a page requested; the browser may refuse to open it."""
        try:
            async with asyncio.timeout(NEW_TAB_TIMEOUT_S):
                await self._has_new_tab.wait()
            await self._loaded(self.page)
        except TimeoutError:
            logger.debug("no tab was opened")

    async def _loaded(self, page: Page) -> None:
        """Wait until a page has loaded. A slow page is used as it is."""
        try:
            await self._guard(page.wait_for_load_state("load"))
        except BrowserTimeout:
            logger.debug("page is slow url=%s", page.url)

    async def perform(self, action: WebAction) -> None:
        """Perform an action. The next snapshot contains its effect.

        Raises:
            InvalidAction: it is impossible here; the text is written for the agent.
            EnvFailure: the browser is gone or hangs, or a site has failed.
        """
        self.dialogs.clear()
        self._has_new_tab.clear()
        try:
            await self._guard(self._act(action))
        except InvalidAction as error:
            if self._site_failure:
                raise EnvFailure(self._site_failure) from error
            raise
        except BrowserTimeout:
            logger.debug("action is slow kind=%s", action.kind)
        except BrowserError as error:
            if _is_leaving(error):
                return
            raise InvalidAction(f"The action failed: {first_line(error)}") from error

    async def _act(self, action: WebAction) -> None:
        """Perform an action on the tabs or on the page."""
        match action.kind:
            case WebActionType.NEW_TAB if len(self.tabs) >= MAX_TABS:
                raise InvalidAction(f"There are {MAX_TABS} tabs already.")
            case WebActionType.NEW_TAB:
                await self.context.new_page()
            case WebActionType.TAB_FOCUS if not 0 <= action.element < len(self.tabs):
                raise InvalidAction(f"There is no tab {action.element}.")
            case WebActionType.TAB_FOCUS:
                self._current = self.tabs[action.element]
                await self.page.bring_to_front()
            case WebActionType.CLOSE_TAB if len(self.tabs) == 1:
                raise InvalidAction("The last tab cannot be closed.")
            case WebActionType.CLOSE_TAB:
                await self.page.close()
            case WebActionType.GOTO if not self._may_go(action.text):
                url = action.text[:200]
                raise InvalidAction(f'Invalid goto action: "{url}" is not among the sites here.')
            case _:
                await act(self.page, action)

    async def tab_titles(self) -> list[str]:
        """Return the titles of all tabs."""
        return [await self._guard(page.title()) for page in self.tabs]

    async def _guard(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Await a browser call under a deadline.

        Raises EnvFailure if the browser is dead or hangs.
        """
        try:
            async with asyncio.timeout(self._timeout_s * 2 + GRACE_S):
                return await work
        except TimeoutError as error:
            raise EnvFailure("the browser does not answer") from error
        except BrowserError as error:
            browser = self.context.browser
            if browser is None or not browser.is_connected():
                raise EnvFailure("the browser process has ended") from error
            raise

    async def close(self) -> None:
        """Close the context; that of a dead browser is already closed."""
        try:
            async with asyncio.timeout(GRACE_S):
                await self.context.close()
        except (BrowserError, TimeoutError) as error:
            logger.debug("failed to close context error=%s", first_line(error))


def _is_leaving(error: BrowserError) -> bool:
    """Return whether an error comes from a page that is being left."""
    return any(word in str(error) for word in GONE_WORDS)
