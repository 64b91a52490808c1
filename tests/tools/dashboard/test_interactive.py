"""Laws of playing at a page: real environments in a real hub that is started for it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import psutil
import pytest

from actor.rollout.episode import state_number
from common.errors import ConfigError, EnvError
from tests.actor.toy_servers import ToyEndpoint, serve
from tools.dashboard.interactive import MAX_EPISODES, InteractiveEpisodes, RecordedEpisode

pytestmark = pytest.mark.slow
ITEM = "DoubleT-train-0"


def at_table(work: Callable[[InteractiveEpisodes], Awaitable[None]], **given: float) -> None:
    async def run() -> None:
        table = InteractiveEpisodes(**given)
        try:
            await work(table)
        finally:
            await table.shut_down()

    asyncio.run(run())
    assert [p for p in psutil.Process().children() if "envhub" in " ".join(p.cmdline())] == []


async def recorded(table: InteractiveEpisodes, num_turns: int) -> RecordedEpisode:
    """Play some turns, written down as a journal would have them."""
    looks = [await table.open("maze", ITEM)]
    actions = ["move right", "jump", "move right", "move left"][:num_turns]
    looks += [await table.step(looks[0]["id"], action) for action in actions]
    await table.close(looks[0]["id"])
    shown = [f"<user>\n{look['observation']}<end>\n<agent>" for look in looks[:-1]]
    return RecordedEpisode(
        env="maze",
        item=ITEM,
        style="compact",
        actions=actions,
        shown=shown,
        scores=[look["reward"] for look in looks[1:]],
        states=[],
    )


def test_episode_accepts_manual_and_policy_turns() -> None:
    async def work(table: InteractiveEpisodes) -> None:
        assert "DoubleT" in (await table.environments())["maze"]["subsets"]
        first = await table.open("maze", ITEM)
        assert first["actions"] == ["move right"]
        hub = next(p for p in psutil.Process().children() if "envhub" in p.cmdline())
        assert "envhub.token=${oc.env:LONGSTRIDE_TABLE_TOKEN}" in hub.cmdline()
        second = await table.step(first["id"], "move right")
        assert (second["turn"], second["valid"], second["done"]) == (1, True, False)
        assert second["picture"] != first["picture"]
        toy = ToyEndpoint(script=["move right", 500])
        with serve(toy.app()) as url:
            asked = {"url": f"{url}/v1", "model": "m", "key": "sk-mine"}
            third = await table.ask(first["id"], **asked)
            assert (third["action"], third["turn"]) == ("move right", 2)
            roles = [each["role"] for each in toy.requests[0]["messages"]]
            assert roles == ["user", "assistant", "user"]
            assert toy.keys == ["Bearer sk-mine"]
        with pytest.raises(ConfigError, match=r"127\.0\.0\.1"):  # it is gone; the episode is not
            await table.ask(first["id"], **asked)
        assert (await table.step(first["id"], "move left"))["turn"] == 3
        with pytest.raises(ConfigError, match=r"config\.yaml is missing"):
            await table.ask_run(first["id"], "/nowhere/nowhere")
        await table.close(first["id"])
        with pytest.raises(ConfigError, match="closed"):
            await table.step(first["id"], "move left")
        await pictures_are_those_of_the_episode(table)

    async def pictures_are_those_of_the_episode(table: InteractiveEpisodes) -> None:
        episode = await recorded(table, 4)
        done = await table.redo(episode, {})
        assert (len(done["pictures"]), done["problem"]) == (5, "")
        assert done["pictures"][0] != done["pictures"][1] == done["pictures"][2]
        shown = [*episode["shown"][:2], "<user>\nat 9 9<end>", episode["shown"][3]]
        other = await table.redo(replace_in(episode, shown=shown), {})
        assert len(other["pictures"]) == 2
        assert "The observation before turn 3" in other["problem"]
        other = await table.redo(replace_in(episode, scores=[0.0, 1.0, 0.0, 0.0]), {})
        assert (len(other["pictures"]), "reward of turn 2" in other["problem"]) == (2, True)
        states = [state_number("at (1, 1)"), state_number("elsewhere")]
        other = await table.redo(replace_in(episode, states=states), {})
        assert (len(other["pictures"]), "The state of" in other["problem"]) == (1, True)
        gone = await table.redo(replace_in(episode, item="DoubleT-train-9999"), {})
        assert (gone["pictures"], "out of range" in gone["problem"]) == ([], True)

    at_table(work)


def replace_in(episode: RecordedEpisode, **changes: Any) -> RecordedEpisode:
    return RecordedEpisode(**{**episode, **changes})  # type: ignore[typeddict-item]


def test_episodes_are_limited_and_idle_ones_close() -> None:
    async def work(table: InteractiveEpisodes) -> None:
        with pytest.raises(ConfigError, match="no such environment"):
            await table.open("chess", "a-train-0")
        with pytest.raises(EnvError, match="out of range"):
            await table.open("maze", "DoubleT-train-9999")
        opened = [table.open("maze", ITEM) for _ in range(MAX_EPISODES + 1)]
        results = await asyncio.gather(*opened, return_exceptions=True)
        assert [type(each) for each in results].count(ConfigError) == 1
        names = [each["id"] for each in results if isinstance(each, dict)]
        async with asyncio.timeout(20):
            while not await is_closed(table, names[0]):
                await asyncio.sleep(2.5)

    async def is_closed(table: InteractiveEpisodes, name: str) -> bool:
        try:
            await table.step(name, "move right")
        except ConfigError:
            return True
        return False

    at_table(work, idle_s=2.0)
