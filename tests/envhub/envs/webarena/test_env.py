"""WebArena's tasks on remote sites in a real browser, and the requirements of serving them."""

from collections.abc import Iterator
from typing import cast

import pytest

from common.config.envs import BrowserOptions, EnvsSection, WebarenaOptions
from common.errors import ConfigError
from envhub.catalogue.registry import missing_requirements
from envhub.env import AsyncEnv, EnvFailure, EnvSpec, Style, SubsetSpec
from envhub.envs.webarena import env as webarena
from envhub.envs.webarena.env import RemoteWorld, public_names
from envhub.web.site_tasks.checks import grade
from envhub.web.site_tasks.env import SiteCatalogue, SiteTaskEnv
from tests.envhub.web.web_rig import Rig, needs_browser

SUBSETS = {"Shopping": SubsetSpec(num_train=1, num_test=1, max_turns=15)}


@pytest.fixture(scope="module")
def foreign() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.stop()


def remote_spec(url: str, checks: dict) -> tuple[EnvSpec, RemoteWorld]:
    """Return an environment of one task on a site elsewhere, as WebArena's are."""
    options = EnvsSection(webarena=WebarenaOptions(shopping=url + "/"))
    task = {"sites": ["shopping"], "start_url": f"{url}/ |AND| {url}/other", "intent": "Say hi",
            "eval": checks}  # fmt: skip
    world = RemoteWorld(options)
    names = public_names(options.webarena.sites)
    catalogue = SiteCatalogue(subsets=SUBSETS, find=lambda item: task, names=names, max_words=500)
    spec = EnvSpec(
        name="x", subsets=SUBSETS, instruction={},
        make=lambda style: SiteTaskEnv(style, catalogue, world),
    )  # fmt: skip
    return spec, world


@needs_browser
@pytest.mark.slow
def test_remote_sites_show_public_names_and_are_graded(foreign: Rig):
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
        env = cast(AsyncEnv, spec.make(Style.AGENTGYM))
        seen = await env.reset("Shopping-test-0", 0)
        assert "Tab 0 (current): Home | Tab 1: Other" in seen
        assert "URL: http://onestopmarket.com/\n" in seen
        assert foreign.site.address not in seen
        result = await env.step("```goto [http://onestopmarket.com/other?said=hi]```")
        assert result.is_valid
        assert "You said hi" in result.observation
        try:
            return (await env.step("```stop []```")).reward
        finally:
            await env.close()
            await world.stop()

    assert foreign.run(episode(checks)) == 1.0
    assert foreign.run(episode({**checks, "program_html": [broken]})) == 0.0
    prepared = {**last, "prep_actions": ["document.querySelector('.none').click()"]}
    assert foreign.run(episode({**checks, "program_html": [prepared]})) == 1.0
    failing = {**target, "url": f"{url}/broken"}
    with pytest.raises(EnvFailure, match="status 503"):
        foreign.run(episode({**checks, "program_html": [failing]}))


@needs_browser
@pytest.mark.slow
def test_reset_fails_when_a_site_reports_its_own_error(foreign: Rig):
    url = f"http://{foreign.site.address}"

    async def episode():
        spec, world = remote_spec(f"{url}/broken?", {"eval_types": []})
        env = cast(AsyncEnv, spec.make(Style.COMPACT))
        with pytest.raises(EnvFailure, match="status 503"):
            await env.reset("Shopping-test-0", 0)
        await world.stop()

    foreign.run(episode())


@needs_browser
@pytest.mark.slow
def test_check_of_a_page_that_is_gone_raises(foreign: Rig):
    target = {"url": "last", "locator": "document.title",
              "required_contents": {"exact_match": "Home"}}  # fmt: skip
    checks = {"eval_types": ["program_html"], "program_html": [target]}

    async def episode():
        session = await foreign.session()
        assert await grade(checks, session, "") == 1.0
        await session.page.close()
        with pytest.raises(EnvFailure, match="gone"):
            await grade(checks, session, "")
        await session.close()

    foreign.run(episode())


@needs_browser
@pytest.mark.slow
def test_reset_fails_when_site_is_unreachable(foreign: Rig):
    async def episode():
        spec, world = remote_spec("http://127.0.0.1:9", {"eval_types": []})
        env = cast(AsyncEnv, spec.make(Style.COMPACT))
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


def test_missing_addresses_are_refused_with_remedy():
    (line,) = missing_requirements(["webarena"], EnvsSection())
    assert "envs.webarena.shopping=http://HOST:7770" in line
    assert "env=minisites" in line
    with pytest.raises(ConfigError, match="minisites"):
        webarena.make_spec(EnvsSection())
