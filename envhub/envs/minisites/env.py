"""Minisites: our own small web sites, similar to WebArena's.

They are a shop and its administration, a map, a code host and a forum. Results on them are not
results on WebArena and are not comparable with any.
"""

from common.config.envs import EnvsSection
from envhub.env import EnvSpec, UnknownItem
from envhub.envs.minisites.tasks import SUBSETS, make_task
from envhub.envs.minisites.world import LocalWorld
from envhub.tasks import load_tasks
from envhub.web.browser import check_browser
from envhub.web.site_tasks.env import PublicNames, SiteCatalogue, site_tasks_spec

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
