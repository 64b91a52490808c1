"""WebArena: the tasks of the package `libwebarena`, on its own sites at configured addresses."""

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from common.config.envs import EnvsSection, WebarenaOptions
from common.errors import ConfigError
from envhub.digests import digest_of_files
from envhub.env import EnvFailure, EnvSpec, ItemId, SubsetSpec, UnknownItem
from envhub.tables import read_table
from envhub.tasks import first_items
from envhub.web.browser import BrowserHost, check_browser, host_rules
from envhub.web.session import SnapshotSettings, WebSession
from envhub.web.site_tasks.checks import unsupported
from envhub.web.site_tasks.env import (
    PublicNames,
    SiteCatalogue,
    may_go,
    site_tasks_spec,
    start_urls,
)

_TABLE = read_table(__file__, "sites.yaml")
SITES: dict[str, dict[str, str]] = _TABLE["sites"]
ACCOUNT_SITES: list[str] = _TABLE["with_accounts"]


def check_urls(options: WebarenaOptions) -> list[str]:
    """Return a line with its remedy for each unusable address or login."""
    lines = []
    for name, url in options.sites.items():
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            lines.append(f"envs.webarena.{name}={url!r} is not a URL such as http://host:7770")
    if options.auth_dir and not Path(options.auth_dir).is_dir():
        lines.append(f"envs.webarena.auth_dir={options.auth_dir!r} is not a folder")
    elif options.auth_dir:
        sites = [name for name in ACCOUNT_SITES if name in options.sites]
        lines += [
            f"envs.webarena.auth_dir lacks {name}_state.json, so tasks of {name} start logged out"
            for name in sites
            if not (Path(options.auth_dir) / f"{name}_state.json").is_file()
        ]
    return lines


def login_state(options: WebarenaOptions, sites: list[str]) -> str | None:
    """Return the cookie file of a task's accounts; None if there is none.

    The file of a task on two sites has both names, in alphabetical order.
    """
    if not options.auth_dir:
        return None
    accounts = sorted(site for site in sites if site in ACCOUNT_SITES)
    path = Path(options.auth_dir) / f"{'.'.join(accounts)}_state.json"
    return str(path) if accounts and path.is_file() else None


def public_names(sites: Mapping[str, str]) -> PublicNames:
    """Return the public names of the sites' addresses."""
    return PublicNames({url: SITES[name]["public"] for name, url in sites.items()})


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
        login = login_state(self._options.webarena, task["sites"])
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


REMEDY = "pip install --no-deps libwebarena"
MAX_TURNS = 15
TEST_EVERY = 5
MULTI = "Multi"


def tasks_path() -> Path | None:
    """Return the task file; None if `libwebarena` is not installed.

    The package is located without an import, which would start downloads.
    """
    spec = importlib.util.find_spec("webarena")
    folders = (spec.submodule_search_locations or []) if spec else []
    paths = [Path(folder) / "test.raw.json" for folder in folders]
    return next((path for path in paths if path.is_file()), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class WebArenaTasks:
    """The executable tasks by subset and split, in the order of their WebArena numbers.

    Attributes:
        skipped: number of a task -> the reason why it cannot run or be graded.
    """

    items: Mapping[tuple[str, str], tuple[dict[str, Any], ...]]
    skipped: Mapping[int, str]

    @property
    def subsets(self) -> dict[str, SubsetSpec]:
        """Sizes of the subsets that have tasks."""
        names = dict.fromkeys(subset for subset, _ in self.items)
        return {
            name: SubsetSpec(
                num_train=len(self.items[name, "train"]),
                num_test=len(self.items[name, "test"]),
                max_turns=MAX_TURNS,
            )
            for name in names
        }

    def task(self, item: ItemId) -> dict[str, Any]:
        """Return an item's configuration, with the sites' addresses filled in."""
        return self.items[item.subset, item.split][item.index]

    def item_id(self, number: int) -> str:
        """Return the item of a WebArena task number.

        Raises: UnknownItem: no such task here.
        """
        for (subset, split), tasks in self.items.items():
            for index, task in enumerate(tasks):
                if task["task_id"] == number:
                    return f"{subset}-{split}-{index}"
        why = self.skipped.get(number, "the numbers are 0 to 811")
        raise UnknownItem(f"no WebArena task {number}: {why}")


def read_tasks(path: Path, sites: Mapping[str, str]) -> WebArenaTasks:
    """Return the tasks whose sites all have an address.

    Args:
        sites: address of each configured site, by WebArena's name, without a trailing slash.
    """
    chosen: dict[str, list[dict[str, Any]]] = {}
    skipped: dict[int, str] = {}
    for raw in _raw_tasks(path):
        number = raw["task_id"]
        missing = [site for site in raw["sites"] if site not in sites]
        lacking = unsupported(raw["eval"])
        if missing or lacking:
            reason = f"envs.webarena.{missing[0]} is not set" if missing else f"needs {lacking}"
            skipped[number] = reason
            continue
        subset = SITES[raw["sites"][0]]["subset"] if len(raw["sites"]) == 1 else MULTI
        chosen.setdefault(subset, []).append(_with_addresses(raw, sites))
    items: dict[tuple[str, str], tuple[dict[str, Any], ...]] = {}
    for subset, tasks in chosen.items():
        # The instances of a template are adjacent, so both splits contain nearly all templates.
        items[subset, "train"] = tuple(t for i, t in enumerate(tasks) if i % TEST_EVERY)
        items[subset, "test"] = tuple(t for i, t in enumerate(tasks) if i % TEST_EVERY == 0)
    return WebArenaTasks(items=items, skipped=skipped)


@cache
def _raw_tasks(path: Path) -> tuple[dict[str, Any], ...]:
    """Return the tasks of the package in the order of their numbers."""
    tasks = json.loads(path.read_text(encoding="utf-8"))
    return tuple(sorted(tasks, key=lambda task: task["task_id"]))


def _with_addresses(raw: dict[str, Any], sites: Mapping[str, str]) -> dict[str, Any]:
    """Return a task with the sites' addresses in place of its marks."""
    text = json.dumps(raw)
    for site, url in sites.items():
        text = text.replace(f"__{site.upper()}__", url)
    return json.loads(text)


NOT_CONFIGURED = (
    "webarena needs the addresses of WebArena's sites: set envs.webarena.shopping=http://HOST:7770 "
    "and so on, or use env=minisites, small sites of this project that are not WebArena"
)


def check(options: EnvsSection) -> list[str]:
    """Return a line for each missing requirement of this machine, with its remedy."""
    if not options.webarena.sites:
        return [NOT_CONFIGURED]
    lines = [*check_browser(options.browser), *check_urls(options.webarena)]
    if tasks_path() is None:
        lines.append(f"WebArena's tasks are not installed: {REMEDY}")
    return lines


def make_spec(options: EnvsSection) -> EnvSpec:
    """Return WebArena's catalogue entry: the tasks whose sites all have an address.

    Raises: ConfigError: no site has an address, or the tasks are not installed.
    """
    sites = options.webarena.sites
    path = tasks_path()
    if not sites or path is None:
        raise ConfigError(REMEDY if sites else NOT_CONFIGURED)
    table = read_tasks(path, sites)
    spec = site_tasks_spec(
        "webarena",
        SiteCatalogue(
            subsets=table.subsets,
            find=table.task,
            names=public_names(sites),
            max_words=options.webarena.observation_tokens,
        ),
        RemoteWorld(options),
        options,
        tasks={
            name: first_items(
                "Web navigation", name, num_train=spec.num_train, num_test=spec.num_test
            )
            for name, spec in table.subsets.items()
        },
        from_agentgym=table.item_id,
    )
    content = {"tasks of libwebarena": digest_of_files(path.parent, [path])}
    # All episodes change the same sites.
    return replace(spec, is_repeatable=False, content=content)
