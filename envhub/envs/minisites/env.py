"""Minisites: our own small web sites, similar to WebArena's.

They are a shop and its administration, a map, a code host and a forum. Results on them are not
results on WebArena and are not comparable with any.

The five sites are one application, selected by the Host header. A visitor names its session in the
header `X-Longstride-Session`. Requests without it share a demo session:
`curl -H 'Host: shopping.test' http://127.0.0.1:PORT/`.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any
from zlib import crc32

import aiohttp
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, Field
from starlette.routing import Host

from common.config.envs import BrowserOptions, EnvsSection
from common.http.sessions import open_session
from common.text import counted
from envhub.env import EnvFailure, EnvSpec, SubsetSpec, UnknownItem
from envhub.envs.minisites.drafts import TaskDraft
from envhub.envs.minisites.gitlab import tasks as gitlab_tasks
from envhub.envs.minisites.gitlab.pages import GITLAB
from envhub.envs.minisites.maps import tasks as maps_tasks
from envhub.envs.minisites.maps.pages import MAPS
from envhub.envs.minisites.reddit import tasks as reddit_tasks
from envhub.envs.minisites.reddit.pages import REDDIT
from envhub.envs.minisites.shop import admin_tasks, store_tasks
from envhub.envs.minisites.shop.admin_pages import CMS
from envhub.envs.minisites.shop.store_pages import SHOPPING
from envhub.envs.minisites.site import missing_page
from envhub.envs.minisites.store import Store
from envhub.tasks import load_tasks
from envhub.web.browser import check_browser
from envhub.web.local_site import LocalBrowser
from envhub.web.session import SnapshotSettings, WebSession
from envhub.web.site_tasks.env import (
    PublicNames,
    SiteCatalogue,
    may_go,
    site_tasks_spec,
    start_urls,
)

NUM_WORLDS = 5  # The worlds have the site seeds 0 to 4.
NUM_TRAIN = 240
NUM_TEST = 60
TEST_EVERY = 5  # One in five intents of a template belongs to the test split.
MAX_TURNS = 15


DOMAINS = {
    "Shopping": store_tasks.TASKS,
    "CMS": admin_tasks.TASKS,
    "Maps": maps_tasks.TASKS,
    "GitLab": gitlab_tasks.TASKS,
    "Reddit": reddit_tasks.TASKS,
}
SUBSETS = {
    name: SubsetSpec(num_train=NUM_TRAIN, num_test=NUM_TEST, max_turns=MAX_TURNS)
    for name in DOMAINS
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteTask:
    """A draft with its template's name and its world."""

    template: str
    site_seed: int
    draft: TaskDraft


def make_task(subset: str, split: str, index: int) -> dict[str, Any]:
    """Return one task in WebArena's configuration format, with the expert's solution added.

    Raises:
        KeyError: no such subset or split.
        IndexError: no such index.
    """
    domain = DOMAINS[subset]
    task = split_tasks(subset, split)[index]
    return {
        "task_id": f"{subset}-{split}-{index}",
        "sites": [domain.site],
        "require_login": False,
        "start_url": f"{domain.host}/",
        "intent_template": task.template,
        "intent": task.draft.intent,
        "site_seed": task.site_seed,
        "eval": dict(task.draft.check),
        "solution": [dict(step) for step in task.draft.path],
        "max_turns": MAX_TURNS,
    }


@cache
def split_tasks(subset: str, split: str) -> tuple[SiteTask, ...]:
    """Return the tasks of a split; templates and worlds alternate.

    Raises: KeyError: no such subset or split.
    """
    size = {"train": NUM_TRAIN, "test": NUM_TEST}[split]
    queues = [_template_tasks(subset, name, split) for name in DOMAINS[subset].templates]
    tasks = []
    while len(tasks) < size:
        queues = [queue for queue in queues if queue]
        if not queues:
            num = counted(len(tasks), f"{split} task")
            raise ValueError(f"subset {subset} has only {num} of {size}")
        tasks.extend(queue.pop(0) for queue in queues)
    return tuple(tasks[:size])


def _template_tasks(subset: str, name: str, split: str) -> list[SiteTask]:
    """Return a template's tasks of one split; worlds alternate, and each intent occurs once."""
    domain = DOMAINS[subset]
    by_world: list[list[SiteTask]] = []
    for seed in range(NUM_WORLDS):
        random = Random(f"{subset}-{name}-{seed}")
        drafts = domain.drafts(name, seed, random)
        random.shuffle(drafts)
        by_world.append([SiteTask(template=name, site_seed=seed, draft=draft) for draft in drafts])
    tasks: dict[str, SiteTask] = {}
    for rank in range(max(map(len, by_world))):
        for queue in by_world:
            if rank < len(queue):
                tasks.setdefault(queue[rank].draft.intent, queue[rank])
    chosen = _test_intents(list(tasks))
    return [task for intent, task in tasks.items() if (intent in chosen) == (split == "test")]


def _test_intents(intents: Sequence[str]) -> set[str]:
    """Return the test intents of a template: a fixed fifth."""
    ranked = sorted(intents, key=lambda intent: (crc32(intent.encode()), intent))
    return set(ranked[: -(-len(ranked) // TEST_EVERY)])


SITES = {f"{site.name}.test": site for site in (SHOPPING, CMS, MAPS, GITLAB, REDDIT)}


class DropBody(BaseModel):
    """The session to drop."""

    session: str = Field(min_length=1, max_length=200)


class ResetBody(DropBody):
    """The session to reset, and the seed of its world."""

    seed: int = Field(ge=0, lt=2**31)


def make_app() -> FastAPI:
    """Return an application with its own sessions; run it in one process and one event loop."""
    store = Store()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        store.close()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.store = store

    @app.post("/__reset__")
    async def reset(body: ResetBody) -> dict[str, int]:
        store.reset(body.session, body.seed)
        return {"num_sessions": store.num_sessions}

    @app.post("/__drop__")
    async def drop(body: DropBody) -> dict[str, bool]:
        return {"dropped": store.drop(body.session)}

    @app.exception_handler(404)
    async def missing(request: Request, error: Exception) -> Response:
        return missing_page()

    app.router.routes.extend(Host(host, app=site.router) for host, site in SITES.items())
    return app


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
            context,
            SnapshotSettings(),
            may_go=may_go(set(SITES)),
            action_timeout_s=timeout_s,
            is_own_site=True,
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


NUM_WEBARENA_TASKS = 812


def check(options: EnvsSection) -> list[str]:
    """Return a line for each missing requirement of this machine, with its remedy."""
    return check_browser(options.browser)


def make_spec(options: EnvsSection) -> EnvSpec:
    """Return the catalogue entry of the sites."""
    return site_tasks_spec(
        "minisites",
        SiteCatalogue(
            subsets=SUBSETS,
            find=lambda item: make_task(item.subset, item.split, item.index),
            names=PublicNames({}),
            max_words=options.minisites.observation_tokens,
        ),
        LocalWorld(options.browser),
        options,
        tasks=load_tasks(__file__),
        from_agentgym=from_agentgym,
    )


def from_agentgym(number: int) -> str:
    """Return the training item that replaces a WebArena task number.

    Raises: UnknownItem: not one of 0 to 811.
    """
    if not 0 <= number < NUM_WEBARENA_TASKS:
        raise UnknownItem(f"no WebArena task {number}: the numbers are 0 to 811")
    names = list(SUBSETS)
    subset = names[number % len(names)]
    return f"{subset}-train-{number // len(names) % SUBSETS[subset].num_train}"
