"""Episodes on the minisites, in a real browser."""

import re
from collections.abc import Iterator
from typing import cast

import pytest

from common.config.env import RemoteOptions
from common.config.envs import EnvsSection
from envhub.catalogue.registry import Registry
from envhub.env import AsyncEnv, Style, UnknownItem
from envhub.envs.minisites import env as minisites
from tests.envhub.web.web_rig import (
    EnvRig,
    assert_played_alike_elsewhere,
    env_rigs,
    needs_browser,
    play,
)
from tools.author.listing import list_rows

DOMAINS = ("Shopping", "CMS", "Maps", "GitLab", "Reddit")


def test_tasks_name_items_that_exist():
    spec = minisites.make_spec(EnvsSection())
    assert tuple(spec.tasks) == DOMAINS
    for name, at_least in zip(DOMAINS, (15, 15, 10, 10, 10), strict=True):
        task, size = spec.tasks[name], spec.subsets[spec.tasks[name].subset]
        assert task.note == "minisites, not WebArena"
        assert len(task.test) >= at_least
        assert task.test == tuple(f"{name}-test-{i}" for i in range(size.num_test))
        assert task.train == tuple(f"{name}-train-{i}" for i in range(size.num_train))


def test_lists_mark_minisites_as_not_webarena():
    rows = list_rows(["minisites"], EnvsSection(), RemoteOptions(), is_short=False)
    titles = {row.task for row in rows if row.env == "minisites"}
    assert titles == {f"{name} (minisites, not WebArena)" for name in DOMAINS}
    tasks = Registry(["minisites"]).catalogue()["minisites"]["tasks"]
    assert {task["note"] for task in tasks.values()} == {"minisites, not WebArena"}


def test_every_webarena_number_maps_to_item():
    items = [minisites.from_agentgym(number) for number in range(812)]
    assert items[:6] == [
        "Shopping-train-0", "CMS-train-0", "Maps-train-0", "GitLab-train-0", "Reddit-train-0",
        "Shopping-train-1",
    ]  # fmt: skip
    assert len(set(items)) == 812
    with pytest.raises(UnknownItem):
        minisites.from_agentgym(812)


@pytest.fixture(scope="module")
def sites() -> Iterator[EnvRig]:
    yield from env_rigs(minisites.make_spec)


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize(
    ("style", "numbers"),
    [
        (Style.AGENTGYM, (7,)),
        *(
            pytest.param(style, (0, 7), marks=pytest.mark.long)
            for style in (Style.COMPACT, Style.AGENTGYM)
        ),
    ],
)
def test_expert_solves_tasks_of_every_domain(sites: EnvRig, style: Style, numbers: tuple[int, ...]):
    async def some():
        items = [f"{domain}-test-{i}" for domain in DOMAINS for i in numbers]
        return [(item, (await play(sites.spec, item, style))[1]) for item in items]

    assert [item for item, reward in sites.run(some()) if reward != 1.0] == []


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize(
    "domains",
    [
        pytest.param(("Maps", "CMS"), marks=pytest.mark.long),
        pytest.param(DOMAINS, marks=pytest.mark.long),
    ],
)
def test_observations_repeat_in_another_process_and_order(sites: EnvRig, domains: tuple[str, ...]):
    items = [f"{domain}-train-3" for domain in domains]

    first = assert_played_alike_elsewhere(sites, minisites.make_spec, items)
    assert "127.0.0.1" not in str(first)


@needs_browser
@pytest.mark.slow
def test_stopping_with_nothing_done_earns_nothing(sites: EnvRig):
    async def episode():
        env = cast(AsyncEnv, sites.spec.make(Style.AGENTGYM))
        seen = await env.reset("Shopping-test-0", 0)
        assert seen.startswith("OBSERVATION:\nTab 0 (current): ")
        assert seen.endswith("PREVIOUS ACTION: None")
        result = await env.step("click [1]")
        assert (result.is_valid, result.reward, result.done) == (False, 0.0, False)
        result = await env.step("```goto [http://127.0.0.1/]```")
        assert not result.is_valid
        result = await env.step("I give up ```stop [no idea]```")
        assert (result.reward, result.done) == (0.0, True)
        await env.close()

    sites.run(episode())


@needs_browser
@pytest.mark.slow
def test_previous_action_is_shown_with_element(sites: EnvRig):
    async def episode():
        env = cast(AsyncEnv, sites.spec.make(Style.AGENTGYM))
        seen = await env.reset("Shopping-test-0", 0)
        number, line = re.findall(r"^\t*\[(\d+)\] (link '[^']*')$", seen, re.MULTILINE)[0]
        result = await env.step(f"```click [{number}]```")
        click = f"PREVIOUS ACTION: click [{number}] where [{number}] is {line}"
        assert result.observation.endswith(click)
        result = await env.step("```stop [no idea]```")
        assert result.observation.startswith("OBSERVATION:\nTab 0 (current): ")
        assert result.observation.endswith("PREVIOUS ACTION: stop [no idea]")
        await env.close()

    sites.run(episode())
