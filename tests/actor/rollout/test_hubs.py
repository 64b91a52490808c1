"""Laws of several hubs that serve one run, against real servers."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from actor.rollout.hubs import Hubs
from common.errors import EnvError
from common.wire.join_messages import HubPlace
from tests.actor.toy_servers import ToyHub, serve

DEAD = "http://127.0.0.1:1"


def place(url: str, *envs: str) -> HubPlace:
    return HubPlace(url=url, token="t", envs=list(envs or ("toy",)))


def play(places: list[HubPlace], law: Callable[[Hubs], Awaitable[None]]) -> None:
    async def run() -> None:
        hubs = Hubs(lambda: places, style="compact", timeout_s=10.0)
        await hubs.start()
        try:
            await law(hubs)
        finally:
            await hubs.close()

    asyncio.run(run())


async def open_many(hubs: Hubs, num: int) -> list[str]:
    async def one(i: int) -> str:
        session = await hubs.open("toy", f"a-test-{i}", seed=0)
        await session.close()
        return session.first_observation

    return [await one(i) for i in range(num)]


def test_sessions_are_spread_over_the_hubs_that_serve_an_environment() -> None:
    first, second = ToyHub(), ToyHub()

    async def law(hubs: Hubs) -> None:
        assert hubs.instruction("toy") == "Play."
        assert await open_many(hubs, 6) == [f"begin a-test-{i}" for i in range(6)]

    with serve(first.app()) as a, serve(second.app()) as b:
        play([place(a), place(b), place("http://127.0.0.1:2", "another")], law)
    assert (len(first.opened), len(second.opened)) == (3, 3)


def test_what_a_dead_hub_served_is_served_by_the_others() -> None:
    hub = ToyHub()
    places = [place(DEAD)]

    async def law(hubs: Hubs) -> None:
        places.append(place(DEAD))
        assert len(await open_many(hubs, 3)) == 3

    with serve(hub.app()) as url:
        places.append(place(url))
        play(places, law)
    assert len(hub.opened) == 3


def test_a_hub_that_moves_is_followed() -> None:
    before, after = ToyHub(), ToyHub()

    with serve(before.app()) as old, serve(after.app()) as new:
        places = [place(old)]

        async def law(hubs: Hubs) -> None:
            await open_many(hubs, 1)
            places[:] = [place(new)]
            await open_many(hubs, 2)

        play(places, law)
    assert (len(before.opened), len(after.opened)) == (1, 2)


def test_an_environment_without_a_hub_is_an_error_that_names_it() -> None:
    async def law(hubs: Hubs) -> None:
        with pytest.raises(EnvError, match="no hub serves chess"):
            await hubs.open("chess", "x", seed=0)

    with serve(ToyHub().app()) as url:
        play([place(url)], law)


def test_an_actor_does_not_start_if_no_hub_answers() -> None:
    async def law(_: Hubs) -> None: ...

    with pytest.raises(EnvError, match="4 tries"):
        play([place(DEAD)], law)
