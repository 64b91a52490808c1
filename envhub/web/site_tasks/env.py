"""Episodes of tasks on web sites, in WebArena's task format."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

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
from envhub.web.site_tasks import text
from envhub.web.site_tasks.addresses import PublicNames
from envhub.web.site_tasks.evaluate import grade
from envhub.web.site_tasks.solution import Solution

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
            tabs = text.tab_line(await session.tab_titles(), current)
        if self._style is Style.AGENTGYM:
            lines = tree.agentgym_lines(self._shown)
            write = text.agentgym
        else:
            lines = tree.compact_lines(self._shown, self._snapshot.nodes, ids=False)
            write = text.compact
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
