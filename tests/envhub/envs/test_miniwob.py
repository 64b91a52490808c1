"""MiniWoB pages in a real browser."""

import asyncio
from collections.abc import Iterator
from itertools import cycle
from typing import cast

import pytest

from common.config.envs import BrowserOptions, EnvsSection
from common.repository import ROOT
from envhub.env import AsyncEnv, ItemId, Style, UnknownItem, parse_item
from envhub.envs.miniwob import env as miniwob
from envhub.envs.miniwob import pages
from envhub.envs.miniwob.experts import table as experts
from tests.envhub.web.web_rig import (
    EnvRig,
    assert_played_alike_elsewhere,
    env_rigs,
    has_browser,
    play,
)

browser = pytest.mark.skipif(
    not has_browser() or pages.pages_dir() is None, reason="no Chromium or no MiniWoB pages"
)


def test_pages_are_those_of_the_package():
    folder = pages.pages_dir()
    if folder is None:
        pytest.skip("the package miniwob is not installed")
    assert sorted(path.stem for path in (folder / "miniwob").glob("*.html")) == list(pages.PAGES)


def test_subsets_are_single_pages_and_two_pools():
    assert len(miniwob.SUBSETS) == 130 + 2
    assert miniwob.POOLS["click_tab_2"] == ("click-tab-2",)
    assert set(miniwob.POOLS["first_steps"]) <= set(miniwob.POOLS["all"])
    assert miniwob.SUBSETS["click_tab_2"].num_test == 100


def test_every_page_has_an_expert_or_a_documented_reason():
    assert set(experts.BY_PAGE) | set(pages.UNSOLVABLE) == set(pages.PAGES)
    assert not set(experts.BY_PAGE) & set(pages.UNSOLVABLE)
    asking = {page for page, facts in pages.PAGES.items() if "inside" in facts}
    assert asking <= set(experts.BY_PAGE)
    docs = (ROOT / "docs" / "ENVIRONMENTS.md").read_text(encoding="utf-8")
    told = " ".join(docs.split())
    assert all(f"`{page}` {reason}" in told for page, reason in pages.UNSOLVABLE.items())


def test_tasks_hold_only_solvable_pages():
    tasks = miniwob.make_spec(EnvsSection()).tasks
    items = [parse_item(i, miniwob.SUBSETS) for t in tasks.values() for i in (*t.train, *t.test)]
    found = {pages.page_and_seed(item, miniwob.POOLS[item.subset])[0] for item in items}
    assert found == set(experts.BY_PAGE)


def test_pool_items_alternate_over_its_pages():
    pool = ("a-b", "c")
    items = [ItemId(subset="x", split="test", index=i) for i in range(3)]
    assert [pages.page_and_seed(item, pool) for item in items] == [
        ("a-b", "a-b/test/0"),
        ("c", "c/test/0"),
        ("a-b", "a-b/test/1"),
    ]


def test_check_names_a_missing_browser():
    options = EnvsSection(browser=BrowserOptions(executable="/nowhere/chromium"))
    assert any("/nowhere/chromium" in line for line in miniwob.check(options))


@pytest.fixture(scope="module")
def rig() -> Iterator[EnvRig]:
    yield from env_rigs(miniwob.make_spec)


@browser
@pytest.mark.slow
@pytest.mark.long
def test_expert_solves_every_page_that_it_supports(rig: EnvRig):
    async def all_pages():
        gate = asyncio.Semaphore(4)

        async def one(page: str, style: Style) -> tuple[str, float]:
            async with gate:
                item = f"{pages.subset_name(page)}-test-7"
                return page, (await play(rig.spec, item, style))[1]

        styles = cycle(Style)  # Both styles encode the same commands.
        alternately = zip(experts.BY_PAGE, styles, strict=False)
        return await asyncio.gather(*[one(page, style) for page, style in alternately])

    assert [page for page, reward in rig.run(all_pages()) if reward != 1.0] == []


@pytest.mark.long
@browser
@pytest.mark.slow
def test_observations_are_the_same_in_another_browser(rig: EnvRig):
    items = [
        "click_shape-train-3",
        "book_flight-train-1",
        "social_media-test-2",
        "guess_number-test-5",
    ]

    assert_played_alike_elsewhere(rig, miniwob.make_spec, items)


@browser
@pytest.mark.slow
def test_wrong_click_fails_and_reset_restores_the_page(rig: EnvRig):
    async def episode():
        env = cast(AsyncEnv, rig.spec.make(Style.COMPACT))
        first = await env.reset("click_test_2-train-0", 0)
        print_ = await env.fingerprint()
        wrong = next(line for line in first.splitlines() if "'TWO'" in line).split("]")[0][1:]
        result = await env.step(f"click [{wrong}]")
        assert (result.reward, result.done, result.is_valid) == (0.0, True, True)
        assert await env.reset("click_test_2-train-0", 0) == first
        assert await env.fingerprint() == print_
        await env.reset("click_test_2-train-1", 0)
        assert await env.fingerprint() != print_
        with pytest.raises(UnknownItem):
            await env.reset("click_test-test-100", 0)
        await env.close()

    rig.run(episode())


@browser
@pytest.mark.slow
def test_bad_actions_are_reported_and_end_no_episode(rig: EnvRig):
    async def episode():
        env = cast(AsyncEnv, rig.spec.make(Style.AGENTGYM))
        await env.reset("click_test-train-0", 0)
        for text in ("", "click [0]", "```click [99]```", "```goto [http://a.test]```", "\x00"):
            result = await env.step(text)
            assert (result.is_valid, result.done, result.reward) == (False, False, 0.0)
        assert "PREVIOUS ACTION: Cannot parse action" in result.observation
        result = await env.step("so ```click [0]```")
        assert (result.reward, result.done) == (1.0, True)
        await env.close()

    rig.run(episode())


@browser
@pytest.mark.slow
def test_painted_content_appears_in_the_observation(rig: EnvRig):
    async def first(item: str) -> str:
        env = cast(AsyncEnv, rig.spec.make(Style.COMPACT))
        try:
            return await env.reset(item, 0)
        finally:
            await env.close()

    async def episode():
        sides = await first("count_sides-test-7")
        assert "points: 86,136 56,130 42,103 54,75 84,68 108,86 109,116 86,136" in sides
        assert (await first("visual_addition-test-8")).count("] box ''") == 4
        assert "color [rgb(73, 211, 0)] with" in await first("use_colorwheel_2-test-7")
        assert "Click on the magenta colored box." in await first("click_color-test-9")
        assert "the [ui-icon-disk] icon" in await first("click_menu_2-test-7")
        assert "'touch-area' at: (2,52) size: 156x127" in await first("hot_cold-test-7")

    rig.run(episode())


@browser
@pytest.mark.slow
def test_observation_holds_every_flash_before_buttons(rig: EnvRig):
    async def episode():
        seen, reward = await play(rig.spec, "simon_says-test-7")
        lines = [line for text in seen for line in text.splitlines() if "push'" in line]
        pushed = [line.split("]")[0] for text in seen for line in text.splitlines()
                  if line.startswith("last: click")]  # fmt: skip
        flashed = [line.split("button-")[1][0] for line in lines]
        assert reward == 1.0
        assert len(flashed) in (3, 4, 5)
        assert [str(int(text.split("[")[1]) + 1) for text in pushed] == flashed[: len(pushed)]

    rig.run(episode())


@browser
@pytest.mark.slow
@pytest.mark.parametrize("item", ["click_pie_nodelay-train-104", "terminal-train-209"])
def test_items_of_repaired_pages_can_be_solved(rig: EnvRig, item: str):
    assert rig.run(play(rig.spec, item))[1] == 1.0


@browser
@pytest.mark.slow
@pytest.mark.parametrize("item", ["drag_box-test-18", "drag_box-train-440"])
def test_box_can_be_dragged_over_another(rig: EnvRig, item: str):
    assert rig.run(play(rig.spec, item))[1] == 1.0


@pytest.mark.long
@browser
@pytest.mark.slow
def test_expert_wins_tic_tac_toe_against_random_moves(rig: EnvRig):
    async def games():
        return [(await play(rig.spec, f"tic_tac_toe-test-{i}"))[1] for i in range(8)]

    assert rig.run(games()) == [1.0] * 8
