"""Episodes of tasks on web sites, in WebArena's task format: start pages, texts, solutions."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol
from urllib.parse import urlsplit

from common.config.envs import EnvsSection
from envhub.conversations import begun
from envhub.env import EnvSpec, ItemId, StepResult, Style, SubsetSpec, TaskSpec, parse_item
from envhub.web import tree
from envhub.web.actions import (
    InvalidAction,
    WebAction,
    WebActionType,
    as_reply,
    describe,
    parse,
    read_reply,
    read_web_instructions,
)
from envhub.web.browser import browser_spec
from envhub.web.performing import NO_ELEMENT
from envhub.web.session import WebSession
from envhub.web.site_tasks.checks import grade
from envhub.web.tree import PageNode


def start_urls(task: Mapping[str, Any]) -> list[str]:
    """Return the start addresses of a task, one for each tab."""
    return [url.strip() for url in task["start_url"].split("|AND|")]


def may_go(hosts: set[str]) -> Callable[[str], bool]:
    """Return a function that tests whether an address is on one of these hosts, including ports."""

    def test(url: str) -> bool:
        """Return whether an address is on an allowed host."""
        try:
            parts = urlsplit(url)
        except ValueError:
            return False
        return parts.scheme in ("http", "https") and parts.netloc.lower() in hosts

    return test


class PublicNames:
    """Translates between the sites' addresses and the public names shown to agents.

    Args:
        names: public name by address, both without a trailing slash; {}: agents see the addresses.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        # Longest first: the address of one site may begin with that of another.
        self._pairs = sorted(names.items(), key=lambda pair: -len(pair[0]))
        self._publics = sorted(names.items(), key=lambda pair: -len(pair[1]))

    def public(self, text: str) -> str:
        """Return a text in which public names replace the addresses."""
        for url, public in self._pairs:
            text = text.replace(url, public)
        return text

    def local(self, url: str) -> str:
        """Return the address of a public name."""
        for address, public in self._publics:
            for form in (public, public.replace("http://", "https://"), public[len("http://") :]):
                if url == form or url.startswith((form + "/", form + "?")):
                    return address + url[len(form) :]
        return url


def tab_line(titles: list[str], current: int) -> str:
    """Return the line with the titles of the open tabs."""
    marks = [" (current)" if i == current else "" for i in range(len(titles))]
    return " | ".join(
        f"Tab {i}{mark}: {title}" for i, (mark, title) in enumerate(zip(marks, titles, strict=True))
    )


def agentgym_observation(*, tabs: str, tree: str, url: str, goal: str, previous: str) -> str:
    """Return an observation in AgentGym's wording."""
    return (
        f"OBSERVATION:\n{tabs}\n\n{tree}\nURL: {url}\nOBJECTIVE: {goal}\n"
        f"PREVIOUS ACTION: {previous}"
    )


def compact_observation(*, tabs: str, tree: str, url: str, goal: str, previous: str) -> str:
    """Return an observation for small models; `tabs` and `previous` may be ""."""
    lines = [f"goal: {goal}", f"url: {url}", tabs, tree, f"last: {previous}" if previous else ""]
    return "\n".join(line for line in lines if line)


class Solution:
    """The expert of one episode. It has one solution, and stops when the agent leaves it.

    Args:
        steps: {"do": click|type|stop, "role", "name", "text", "enter", "answer"}; empty if the
            solution is unknown.
    """

    def __init__(self, steps: list[dict[str, Any]]) -> None:
        self._steps = steps
        self._at = 0
        self._is_lost = not steps

    def next(self, nodes: tuple[PageNode, ...], *, only_in_view: bool) -> WebAction | None:
        """Return the next action; None if the solution was left or does not fit the page."""
        if self._is_lost or self._at >= len(self._steps):
            return None
        step = self._steps[self._at]
        if step["do"] == "stop":
            return WebAction(kind=WebActionType.STOP, text=str(step.get("answer", "")))
        node = _find(nodes, step)
        if node is None:
            return None
        if only_in_view and not node.is_in_view:
            return WebAction(kind=WebActionType.SCROLL, text=_direction(node, nodes))
        if step["do"] == "type":
            enter = bool(step.get("enter", False))
            return WebAction(
                kind=WebActionType.TYPE, element=node.id, text=step["text"], enter=enter
            )
        return WebAction(kind=WebActionType.CLICK, element=node.id)

    def follow(self, taken: WebAction, expected: WebAction | None) -> None:
        """Record a performed action, and the expert's action before it."""
        if taken.kind in (WebActionType.SCROLL, WebActionType.HOVER) and taken != expected:
            return
        if taken != expected:
            self._is_lost = True
        elif taken.kind is not WebActionType.SCROLL:
            self._at += 1


def _find(nodes: tuple[PageNode, ...], step: dict[str, Any]) -> PageNode | None:
    """Return the element with a step's role and name."""
    name = " ".join(str(step.get("name", "")).split())
    candidates = [node for node in nodes if node.role == step["role"]]
    exact = [node for node in candidates if node.name == name]
    partial = [node for node in candidates if name and name in node.name]
    return next(iter(exact), None) or (partial[0] if len(partial) == 1 else None)


def _direction(node: PageNode, nodes: tuple[PageNode, ...]) -> str:
    """Return the direction in which to scroll to a node."""
    seen = [other.y for other in nodes if other.is_in_view]
    return "up" if seen and node.y < min(seen) else "down"


MAX_SAMPLED_CLICKS = 200
ENDED = "The episode has ended."


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteCatalogue:
    """The tasks of an environment, and the public names of its sites."""

    subsets: Mapping[str, SubsetSpec]
    find: Callable[[ItemId], dict[str, Any]]
    names: PublicNames
    max_words: int


class SiteResources(Protocol):
    """The resources shared by all episodes of a process: the sites and the browser."""

    async def open(self, task: Mapping[str, Any]) -> WebSession:
        """Return a browser session with the task's start pages open. Raises: EnvFailure."""
        ...

    async def close(self, session: WebSession) -> None:
        """Close an episode's browser session."""
        ...

    async def stop(self) -> None:
        """Stop the browser, and the sites served by this process."""
        ...


class SiteTaskEnv:
    """One task on the sites. It is graded when the agent stops.

    It differs from AgentGym's server on purpose. Typing replaces a field's text. A click chooses an
    option of a list. Dialogs are accepted. Every step but the last has reward 0. No language model
    grades answers.
    """

    def __init__(self, style: Style, catalogue: SiteCatalogue, world: SiteResources) -> None:
        self._style = style
        self._catalogue = catalogue
        self._world = world
        self._session: WebSession | None = None
        self._done = False

    async def reset(self, item_id: str, seed: int = 0) -> str:
        """Start an item. `seed` is unused: the item determines the contents of the sites."""
        task = self._catalogue.find(parse_item(item_id, self._catalogue.subsets))
        await self.close()
        self._task = task
        self._session = await self._world.open(task)
        self._done = False
        self._previous = ""
        self._solution = Solution(task.get("solution", []))
        await self._take_snapshot()
        parts = [f"{n.role} {n.name} {n.states}" for n in self._snapshot.nodes]
        state = json.dumps([task["intent"], self._snapshot.url, parts])
        self._fingerprint = hashlib.sha256(state.encode()).hexdigest()
        return await self._observation()

    async def _take_snapshot(self) -> None:
        """Read the current page."""
        self._snapshot = await self._live().snapshot()
        in_view = self._style is Style.AGENTGYM
        self._shown = tree.shown_nodes(self._snapshot.nodes, only_in_view=in_view)
        self._ids = {node.id for node in self._shown}

    def _live(self) -> WebSession:
        """Return the browser session of the running episode."""
        if self._session is None or self._done:
            raise RuntimeError("step before the reset or after the end of an episode")
        return self._session

    async def step(self, action: str) -> StepResult:
        """Perform one action, given as text."""
        session = self._live()
        expected = self._expected()
        is_valid = True
        try:
            taken = self._parse(action)
            self._previous = self._action_text(taken)
            if taken.kind is WebActionType.STOP:
                observed = ENDED if self._style is Style.COMPACT else await self._observation()
                reward = await grade(self._task["eval"], session, taken.text)
                self._done = True
                return StepResult(observation=observed, reward=reward, done=True, is_valid=True)
            local = (
                self._catalogue.names.local(taken.text) if taken.kind is WebActionType.GOTO else ""
            )
            await session.perform(replace(taken, text=local) if local else taken)
            self._solution.follow(taken, expected)
        except InvalidAction as error:
            is_valid = False
            self._previous = str(error)
        await self._take_snapshot()
        if session.dialogs:
            self._previous += f" ({'; '.join(session.dialogs)})"
        observation = await self._observation()
        return StepResult(observation=observation, reward=0.0, done=False, is_valid=is_valid)

    def _parse(self, reply: str) -> WebAction:
        """Return the action of a reply. Raises: InvalidAction: the page has no such element."""
        action = parse(read_reply(reply, self._style))
        if (
            action.kind in (WebActionType.CLICK, WebActionType.HOVER, WebActionType.TYPE)
            and action.element not in self._ids
        ):
            raise InvalidAction(NO_ELEMENT.format(action.kind, action.element))
        return action

    def _action_text(self, action: WebAction) -> str:
        """Return the text of the previous action. AgentGym's style adds the line of its element."""
        text = describe(action)
        is_on_element = action.kind in (
            WebActionType.CLICK,
            WebActionType.HOVER,
            WebActionType.TYPE,
        )
        if self._style is Style.COMPACT or not is_on_element:
            return text
        lines = zip(self._shown, tree.agentgym_lines(self._shown), strict=True)
        line = next(line for node, line in lines if node.id == action.element)
        return f"{text} where [{action.element}] is {' '.join(line.split()[1:])}"

    async def _observation(self) -> str:
        """Return the text of the current page."""
        session = self._live()
        names = self._catalogue.names
        tabs = ""
        if self._style is Style.AGENTGYM or len(session.tabs) > 1:
            current = session.tabs.index(session.page)
            tabs = tab_line(await session.tab_titles(), current)
        if self._style is Style.AGENTGYM:
            lines = tree.agentgym_lines(self._shown)
            write = agentgym_observation
        else:
            lines = tree.compact_lines(self._shown, self._snapshot.nodes, ids=False)
            write = compact_observation
        none = "None" if self._style is Style.AGENTGYM else ""
        return write(
            tabs=tabs,
            tree=tree.cut(lines, self._catalogue.max_words),
            url=names.public(self._snapshot.url),
            goal=self._task["intent"],
            previous=names.public(self._previous) or none,
        )

    async def valid_actions(self) -> list[str]:
        """Return a sample of actions: clicks on all clickable elements, moves, and stop."""
        if self._done or self._session is None:
            return []
        clicks = [f"click [{node.id}]" for node in self._shown if node.role in tree.INTERACTIVE]
        moves = ["scroll [down]", "scroll [up]", "go_back", "stop []"]
        return [as_reply(action, self._style) for action in [*clicks[:MAX_SAMPLED_CLICKS], *moves]]

    def _expected(self) -> WebAction | None:
        """Return the next action of the solution."""
        in_view = self._style is Style.AGENTGYM
        return self._solution.next(self._snapshot.nodes, only_in_view=in_view)

    async def expert_action(self) -> str | None:
        """Return the next action of the task's solution; None if there is none or it was left."""
        action = None if self._done or self._session is None else self._expected()
        return None if action is None else as_reply(describe(action), self._style)

    async def render(self) -> str:
        """Return the goal, the address and the whole accessibility tree."""
        nodes = tree.shown_nodes(self._snapshot.nodes, only_in_view=False)
        head = [self._task["intent"], self._catalogue.names.public(self._snapshot.url)]
        return "\n".join([*head, *tree.agentgym_lines(nodes)])

    async def detail(self, what: str) -> str | None:
        """Return the `picture` of the page as a data URL; None for anything else."""
        if what != "picture" or self._session is None:
            return None
        return await self._session.picture()

    async def fingerprint(self) -> str:
        """Return the hash of the task and its first page."""
        return self._fingerprint

    async def close(self) -> None:
        """Close the browser session."""
        session = self._session
        self._session = None
        if session is not None:
            await self._world.close(session)


def site_tasks_spec(
    name: str,
    catalogue: SiteCatalogue,
    world: SiteResources,
    options: EnvsSection,
    *,
    tasks: Mapping[str, TaskSpec],
    from_agentgym: Callable[[int], str],
) -> EnvSpec:
    """Return the catalogue entry of an environment with tasks on sites."""
    return browser_spec(
        EnvSpec(
            name=name,
            subsets=catalogue.subsets,
            **begun(name, read_web_instructions(__file__)),
            make=lambda style: SiteTaskEnv(style, catalogue, world),
            tasks=tasks,
            from_agentgym=from_agentgym,
            stop=world.stop,
        ),
        options.browser,
    )
