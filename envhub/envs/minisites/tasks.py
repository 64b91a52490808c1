"""The tasks of the five sites, in WebArena's configuration format."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any
from zlib import crc32

from common.text import counted
from envhub.env import SubsetSpec
from envhub.envs.minisites.drafts import TaskDraft
from envhub.envs.minisites.gitlab import tasks as gitlab_tasks
from envhub.envs.minisites.maps import tasks as maps_tasks
from envhub.envs.minisites.reddit import tasks as reddit_tasks
from envhub.envs.minisites.shop import admin_tasks, store_tasks

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
