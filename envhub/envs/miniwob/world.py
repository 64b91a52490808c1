"""The resources shared by all MiniWoB episodes of a process: page server, browser, tabs."""

from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles

from common.config.envs import BrowserOptions
from envhub.env import EnvFailure
from envhub.envs.miniwob.pages import REMEDY, STEP_MS, pages_dir
from envhub.web.local_site import LocalBrowser
from envhub.web.session import SnapshotSettings, WebSession

HOST = "miniwob.test"
START_SCRIPT = (Path(__file__).parent / "episode.js").read_text(encoding="utf-8")
# Elements of every page that are not part of the task.
FURNITURE = ("query", "reward-display", "sync-task-cover", "click-canvas")
SNAPSHOT = SnapshotSettings(advance_ms=STEP_MS, deep=True, skip=FURNITURE)
MAX_EPISODES_PER_TAB = 200


class _KeptFiles(StaticFiles):
    """Static files that the browser caches."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers["Cache-Control"] = "public, max-age=86400, immutable"
        return response


class MiniwobWorld:
    """The page server and the browser, started on first use, with a pool of tabs."""

    def __init__(self, options: BrowserOptions) -> None:
        self._options = options
        self._local = LocalBrowser(options, _make_app, (HOST,))
        self._idle: list[WebSession] = []
        self._num_episodes: dict[WebSession, int] = {}

    async def borrow(self) -> WebSession:
        """Return a tab for one episode; return it with `give_back`.

        Raises: EnvFailure: there is no browser, or the pages are not installed.
        """
        browser = await self._local.started()
        while self._idle:
            session = self._idle.pop()
            if session.is_alive:
                self._num_episodes[session] += 1
                return session
            self._num_episodes.pop(session)
        context = await browser.open_context(clock=True)
        await context.add_init_script(START_SCRIPT)
        session = WebSession(
            context,
            SNAPSHOT,
            may_go=lambda url: False,
            action_timeout_s=self._options.action_timeout_s,
        )
        self._num_episodes[session] = 1
        return session

    async def give_back(self, session: WebSession) -> None:
        """Return a tab to the pool, or close it after `MAX_EPISODES_PER_TAB` episodes."""
        is_worn = self._num_episodes[session] >= MAX_EPISODES_PER_TAB
        if session.is_alive and len(session.tabs) == 1 and not is_worn:
            self._idle.append(session)
            return
        del self._num_episodes[session]
        await session.close()

    async def stop(self) -> None:
        """Stop the browser and the page server."""
        self._idle.clear()
        await self._local.stop()


def _make_app() -> Starlette:
    """Return the application that serves the pages."""
    folder = pages_dir()
    if folder is None:
        raise EnvFailure(f"the pages of MiniWoB are not installed; run `{REMEDY}`")
    return Starlette(routes=[Mount("/", _KeptFiles(directory=folder))])
