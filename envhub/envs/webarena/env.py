"""WebArena: its tasks, on its own sites at the configured addresses."""

from dataclasses import replace

from common.config.envs import EnvsSection
from common.errors import ConfigError
from envhub.env import EnvSpec
from envhub.envs.webarena import remote_sites, tasks_file
from envhub.envs.webarena.world import RemoteWorld
from envhub.tasks import first_items
from envhub.web.browser import check_browser
from envhub.web.site_tasks.env import SiteCatalogue, site_tasks_spec

NOT_CONFIGURED = (
    "webarena needs the addresses of WebArena's sites: set envs.webarena.shopping=http://HOST:7770 "
    "and so on, or use env=minisites, small sites of this project that are not WebArena"
)


def check(options: EnvsSection) -> list[str]:
    """Return a line for each missing requirement of this machine, with its remedy."""
    if not options.webarena.sites:
        return [NOT_CONFIGURED]
    lines = [*check_browser(options.browser), *remote_sites.check_urls(options.webarena)]
    if tasks_file.tasks_path() is None:
        lines.append(f"WebArena's tasks are not installed: {tasks_file.REMEDY}")
    return lines


def make_spec(options: EnvsSection) -> EnvSpec:
    """Return WebArena's catalogue entry: the tasks whose sites all have an address.

    Raises: ConfigError: no site has an address, or the tasks are not installed.
    """
    sites = options.webarena.sites
    path = tasks_file.tasks_path()
    if not sites or path is None:
        raise ConfigError(tasks_file.REMEDY if sites else NOT_CONFIGURED)
    table = tasks_file.read_tasks(path, sites)
    spec = site_tasks_spec(
        "webarena",
        SiteCatalogue(
            subsets=table.subsets,
            find=table.task,
            names=remote_sites.public_names(sites),
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
    return replace(spec, is_repeatable=False)  # All episodes change the same sites.
