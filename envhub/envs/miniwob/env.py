"""MiniWoB++ pages, played through their accessibility tree in a real browser."""

import hashlib
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles

from common.config.envs import BrowserOptions, EnvsSection
from envhub.digests import digests_of_packages
from envhub.env import EnvFailure, EnvSpec, StepResult, Style, parse_item
from envhub.envs.miniwob import pages
from envhub.envs.miniwob.experts import table as experts
from envhub.envs.miniwob.pages import REMEDY, STEP_MS, pages_dir
from envhub.envs.miniwob.view import PageView
from envhub.tasks import first_items
from envhub.web import tree
from envhub.web.actions import (
    POINTER_KINDS,
    InvalidAction,
    WebAction,
    WebActionType,
    as_reply,
    describe,
    parse,
    read_reply,
    read_web_instructions,
)
from envhub.web.browser import browser_spec, check_browser
from envhub.web.local_site import LocalBrowser
from envhub.web.session import SnapshotSettings, WebSession
from envhub.web.site_tasks.env import agentgym_observation

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
            is_own_site=True,
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
        raise EnvFailure(
            f"the pages of MiniWoB are not installed; run `{REMEDY}` (the extra `web`)"
        )
    return Starlette(routes=[Mount("/", _KeptFiles(directory=folder))])


KINDS = POINTER_KINDS | {
    WebActionType.CLICK,
    WebActionType.HOVER,
    WebActionType.TYPE,
    WebActionType.PRESS,
    WebActionType.SCROLL,
}
MAX_WORDS = 1500
POOLS = pages.pools()
SUBSETS = pages.subset_specs(POOLS)
ENDING = {True: "The task is completed.", False: "The task has failed."}


class MiniwobEnv:
    """One episode on one page. Each snapshot advances the page's virtual clock by one second.

    It differs from the pages' own rules on purpose. There is no time limit and no reward for speed,
    since results must not depend on the machine. Any raw reward above 0 is a success.
    """

    def __init__(self, style: Style, world: MiniwobWorld) -> None:
        self._style = style
        self._world = world
        self._session: WebSession | None = None
        self._done = False
        self._previous = "None"
        self._taken: list[WebAction] = []

    async def reset(self, item_id: str, seed: int = 0) -> str:
        """Start an item. `seed` is unused: the item determines everything."""
        item = parse_item(item_id, SUBSETS)
        self._page, chance = pages.page_and_seed(item, POOLS[item.subset])
        await self.close()
        self._session = await self._world.borrow()
        self._session.dialogs.clear()
        await self._session.open(f"http://{HOST}/miniwob/{self._page}.html")
        await self._session.run("seed => __lsStart(seed)", chance)
        self._done = False
        self._previous = "None"
        self._taken = []
        await self._take_snapshot()
        self._fingerprint = _fingerprint(self._page, self._snapshot)
        return self._observation()

    async def _take_snapshot(self) -> None:
        """Read the page, its goal and its state."""
        assert self._session is not None, "an episode is used before its reset"
        facts = pages.PAGES[self._page]
        self._snapshot = await self._session.snapshot(
            advance_ms=facts.get("step_ms", pages.STEP_MS), has_places=facts.get("places", False)
        )
        state = self._snapshot.state
        if state is None:
            raise EnvFailure(f"the browser has left the page {self._page}")
        self._goal = state["goal"] if not state["isDone"] else self._goal
        self._done = state["isDone"]
        self._reward = 1.0 if state["isDone"] and state["reward"] > 0 else 0.0
        self._shown = tree.shown_nodes(self._snapshot.nodes, only_in_view=False)
        self._ids = {node.id for node in self._shown}

    async def step(self, action: str) -> StepResult:
        """Perform one action, given as text."""
        if self._done or self._session is None:
            raise RuntimeError("step after the episode has ended")
        problem = ""
        try:
            chosen = self._parse(action)
            self._previous = describe(chosen)
            await self._session.perform(chosen)
            self._taken.append(chosen)
        except InvalidAction as error:
            problem = self._previous = str(error)
        await self._take_snapshot()
        observation = self._observation()
        return StepResult(
            observation=observation, reward=self._reward, done=self._done, is_valid=not problem
        )

    def _parse(self, reply: str) -> WebAction:
        """Return the action of a reply. Raises: InvalidAction: no such element."""
        action = parse(read_reply(reply, self._style), KINDS)
        for element in (action.element, action.target):
            if element >= 0 and element not in self._ids:
                raise InvalidAction(f"There is no element [{element}] in the observation.")
        return action

    def _observation(self) -> str:
        """Return the text of the last snapshot."""
        if self._done:
            return ENDING[self._reward > 0]
        if self._style is Style.COMPACT:
            lines = tree.compact_lines(self._shown, self._snapshot.nodes, ids=True)
            text = f"goal: {self._goal}\n{tree.cut(lines, MAX_WORDS)}"
            return text if self._previous == "None" else f"{text}\nlast: {self._previous}"
        return agentgym_observation(
            tabs=f"Tab 0 (current): {self._snapshot.title}",
            tree=tree.cut(tree.agentgym_lines(self._shown), MAX_WORDS),
            url=self._snapshot.url,
            goal=self._goal,
            previous=self._previous,
        )

    async def valid_actions(self) -> list[str]:
        """Return a click on every element, and words of the goal for every field."""
        if self._done:
            return []
        actions = []
        for node in self._shown:
            if node.role in ("textbox", "searchbox", "spinbutton", "combobox"):
                words = [word.strip('".,') for word in self._goal.split()]
                actions += [f"type [{node.id}] [{word}] [0]" for word in words if word]
            actions.append(f"click [{node.id}]")
        return [as_reply(action, self._style) for action in actions]

    async def expert_action(self) -> str | None:
        """Return the action of the page's expert; None if the page has no expert."""
        solve = experts.BY_PAGE.get(self._page)
        if self._done or solve is None:
            return None
        action = solve(
            PageView(
                self._goal, self._snapshot.nodes, tuple(self._taken), await self._script_state()
            )
        )
        return action and as_reply(action, self._style)

    async def _script_state(self) -> Any:
        """Return the state that the page's expert needs from the page's scripts."""
        script = experts.inside_script(self._page)
        if script is None or self._session is None:
            return None
        return await self._session.run(script)

    async def render(self) -> str:
        """Return the goal and the whole accessibility tree."""
        lines = tree.agentgym_lines(tree.shown_nodes(self._snapshot.nodes, only_in_view=False))
        return "\n".join([f"{self._page}: {self._goal}", *lines])

    async def detail(self, what: str) -> str | None:
        """Return the `picture` of the page as a data URL; None for anything else."""
        if what != "picture" or self._session is None:
            return None
        return await self._session.picture()

    async def fingerprint(self) -> str:
        """Return the hash of the page after reset."""
        return self._fingerprint

    async def close(self) -> None:
        """Return the tab to the pool."""
        session = self._session
        self._session = None
        if session is not None:
            await self._world.give_back(session)


def _fingerprint(page: str, snapshot: tree.Snapshot) -> str:
    """Return a hash of all nodes of a page."""
    parts = [f"{node.role} {node.name} {node.states} {node.x} {node.y}" for node in snapshot.nodes]
    return hashlib.sha256("\n".join([page, str(snapshot.state), *parts]).encode()).hexdigest()


def check(options: EnvsSection) -> list[str]:
    """Return a line for each missing requirement of this machine, with its remedy."""
    lines = check_browser(options.browser)
    if pages.pages_dir() is None:
        lines.append(f"the pages of MiniWoB are not installed: {pages.REMEDY} (the extra `web`)")
    return lines


def make_spec(options: EnvsSection) -> EnvSpec:
    """Return MiniWoB's catalogue entry."""
    world = MiniwobWorld(options.browser)
    mixed = {name: len(POOLS[name]) for name in ("first_steps", "all")}
    spec = EnvSpec(
        name="miniwob",
        subsets=SUBSETS,
        instruction=read_web_instructions(__file__, KINDS),
        make=lambda style: MiniwobEnv(style, world),
        tasks={
            f"MiniWoB {name}": first_items(
                "Web navigation", name, num_train=20 * num_pages, num_test=5 * num_pages
            )
            for name, num_pages in mixed.items()
        },
        stop=world.stop,
        content=digests_of_packages("miniwob"),
    )
    return browser_spec(spec, options.browser)
