"""Episodes on the web sites, ours and foreign ones, in a real browser."""

import asyncio
import re
from collections.abc import Iterator

import pytest

from common.config.envs import BrowserOptions, EnvsSection, WebarenaOptions
from envhub.env import EnvFailure, EnvSpec, Style, UnknownItem
from envhub.envs.webarena import env as webarena
from envhub.envs.webarena.remote_sites import PublicNames, configured
from envhub.envs.webarena.world import RemoteWorld, may_go
from tests.envhub.web.web_rig import Rig, has_browser

browser = pytest.mark.skipif(not has_browser(), reason="no Chromium on this machine")
DOMAINS = ("Shopping", "CMS", "Maps", "GitLab", "Reddit")


def test_tasks_name_items_that_exist():
    spec = webarena.make_spec(EnvsSection())
    assert tuple(spec.tasks) == DOMAINS
    for name, at_least in zip(DOMAINS, (15, 15, 10, 10, 10), strict=True):
        task, size = spec.tasks[name], spec.subsets[spec.tasks[name].subset]
        assert len(task.test) >= at_least
        assert task.test == tuple(f"{name}-test-{i}" for i in range(size.num_test))
        assert task.train == tuple(f"{name}-train-{i}" for i in range(size.num_train))


def test_own_item_gives_every_webarena_number_an_item():
    items = [webarena.own_item(number) for number in range(812)]
    assert items[:6] == [
        "Shopping-train-0", "CMS-train-0", "Maps-train-0", "GitLab-train-0", "Reddit-train-0",
        "Shopping-train-1",
    ]  # fmt: skip
    assert len(set(items)) == 812
    with pytest.raises(UnknownItem):
        webarena.own_item(812)


def test_may_go_compares_host_and_port():
    test = may_go({"a.test", "10.0.0.1:7770"})
    assert [
        test(url)
        for url in ("http://a.test/x", "https://A.test", "http://10.0.0.1:7770/", "http://a.test:1/",
                    "http://a.test@b.test/", "file:///etc/passwd", "javascript:1", "http://[")
    ] == [True, True, True, False, False, False, False, False]  # fmt: skip


class Sites:
    """Our own sites' catalogue entry and the loop its episodes live in."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.spec: EnvSpec = webarena.make_spec(EnvsSection())

    def stop(self) -> None:
        assert self.spec.stop is not None
        self.runner.run(self.spec.stop())
        self.runner.close()


@pytest.fixture(scope="module")
def sites() -> Iterator[Sites]:
    sites = Sites()
    yield sites
    sites.stop()


async def play(spec: EnvSpec, item: str, style: Style) -> tuple[list[str], float]:
    """Returns the observations of an episode that the expert plays, and its reward."""
    env = spec.make(style)
    try:
        seen = [await env.reset(item, 0)]
        for _ in range(40):
            action = await env.expert_action()
            assert action is not None, f"{item}: the expert knows no way\n{seen[-1]}"
            result = await env.step(action)
            assert result.is_valid, f"{item}: {action} is refused\n{result.observation}"
            seen.append(result.observation)
            if result.done:
                return seen, result.reward
        return seen, 0.0
    finally:
        await env.close()


@browser
@pytest.mark.slow
@pytest.mark.parametrize("style", list(Style))
def test_expert_solves_tasks_of_every_domain(sites: Sites, style: Style):
    async def some():
        items = [f"{domain}-test-{i}" for domain in DOMAINS for i in (0, 7)]
        return [(item, (await play(sites.spec, item, style))[1]) for item in items]

    assert [item for item, reward in sites.runner.run(some()) if reward != 1.0] == []


@browser
@pytest.mark.slow
def test_observations_are_the_same_in_another_process_and_order(sites: Sites):
    items = [f"{domain}-train-3" for domain in DOMAINS]

    async def twice():
        first = [(await play(sites.spec, item, Style.COMPACT))[0] for item in items]
        other = webarena.make_spec(EnvsSection())
        second = [(await play(other, item, Style.COMPACT))[0] for item in reversed(items)]
        assert other.stop is not None
        await other.stop()
        return first, second[::-1]

    first, second = sites.runner.run(twice())
    assert first == second
    assert "127.0.0.1" not in str(first)


@browser
@pytest.mark.slow
def test_stopping_with_nothing_done_earns_nothing(sites: Sites):
    async def episode():
        env = sites.spec.make(Style.AGENTGYM)
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

    sites.runner.run(episode())


@browser
@pytest.mark.slow
def test_previous_action_is_told_with_the_line_of_its_element_to_the_end(sites: Sites):
    async def episode():
        env = sites.spec.make(Style.AGENTGYM)
        seen = await env.reset("Shopping-test-0", 0)
        number, line = re.findall(r"^\t*\[(\d+)\] (link '[^']*')$", seen, re.MULTILINE)[0]
        result = await env.step(f"```click [{number}]```")
        click = f"PREVIOUS ACTION: click [{number}] where [{number}] is {line}"
        assert result.observation.endswith(click)
        result = await env.step("```stop [no idea]```")
        assert result.observation.startswith("OBSERVATION:\nTab 0 (current): ")
        assert result.observation.endswith("PREVIOUS ACTION: stop [no idea]")
        await env.close()

    sites.runner.run(episode())


@pytest.fixture(scope="module")
def foreign() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.stop()


def remote_spec(url: str, checks: dict) -> tuple[EnvSpec, RemoteWorld]:
    """Returns an environment of one task on a site elsewhere, as WebArena's are."""
    options = EnvsSection(webarena=WebarenaOptions(shopping=url + "/"))
    task = {"sites": ["shopping"], "start_url": f"{url}/ |AND| {url}/other", "intent": "Say hi",
            "eval": checks}  # fmt: skip
    world = RemoteWorld(options)
    names = PublicNames(configured(options.webarena))
    subsets = webarena.own_tasks.SUBSETS
    catalogue = webarena.Catalogue(
        subsets=subsets, find=lambda item: task, names=names, max_words=500
    )
    spec = EnvSpec(
        name="x", subsets=subsets, instruction={},
        make=lambda style: webarena.WebarenaEnv(style, catalogue, world),
    )  # fmt: skip
    return spec, world


@browser
@pytest.mark.slow
def test_remote_sites_show_public_names_and_are_graded_by_page_and_url(foreign: Rig):
    url = f"http://{foreign.site.address}"
    shows_hi = {"exact_match": "You said hi"}
    target = {"url": f"{url}/other?said=hi", "locator": "document.querySelector('p').outerText",
              "required_contents": shows_hi}  # fmt: skip
    last = {**target, "url": "last"}
    broken = {**target, "locator": "document.querySelector('.none').outerText"}
    checks = {"eval_types": ["program_html", "url_match"], "reference_url": f"{url}/other?said=hi",
              "program_html": [target, last]}  # fmt: skip

    async def episode(checks: dict) -> float:
        spec, world = remote_spec(url, checks)
        env = spec.make(Style.AGENTGYM)
        seen = await env.reset("Shopping-test-0", 0)
        assert "Tab 0 (current): Home | Tab 1: Other" in seen
        assert "URL: http://onestopmarket.com/\n" in seen
        assert foreign.site.address not in seen
        result = await env.step("```goto [http://onestopmarket.com/other?said=hi]```")
        assert result.is_valid
        assert "You said hi" in result.observation
        result = await env.step("```stop []```")
        await env.close()
        await world.stop()
        return result.reward

    assert foreign.run(episode(checks)) == 1.0
    assert foreign.run(episode({**checks, "program_html": [broken]})) == 0.0


@browser
@pytest.mark.slow
def test_reset_fails_when_a_site_does_not_answer(foreign: Rig):
    async def episode():
        spec, world = remote_spec("http://127.0.0.1:9", {"eval_types": []})
        env = spec.make(Style.COMPACT)
        with pytest.raises(EnvFailure, match="cannot be opened"):
            await env.reset("Shopping-test-0", 0)
        await env.close()
        await world.stop()

    foreign.run(episode())


def test_check_names_missing_browser_and_bad_site():
    options = EnvsSection(
        browser=BrowserOptions(executable="/nowhere/chromium"),
        webarena=WebarenaOptions(gitlab="gitlab:8023"),
    )
    lines = "\n".join(webarena.check(options))
    assert "/nowhere/chromium" in lines
    assert "envs.webarena.gitlab" in lines
