"""Laws of rounds at a hub with fewer sessions than a batch has episodes."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from actor.rollout.context import Turn
from actor.rollout.hubs import Hubs
from actor.rollout.lockstep import Rounds
from actor.rollout.pool import EpisodePool
from common.config.actor import ActorSection
from common.wire.messages import HubPlace, Lease, Trajectory
from envhub.catalogue.registry import Registry
from envhub.hosting.sessions import Sessions
from envhub.http.routes import make_app
from tests.actor.rollout.test_recording import (
    Box,
    PlainLetters,
    SeededEngine,
    Served,
    lease_of,
    options_of,
)
from tests.actor.toy_servers import serve

NUM_EPISODES = 5


class TogetherEngine(SeededEngine):
    """Samples rounds, and keeps the episodes of each of them."""

    def __init__(self, env: str) -> None:
        super().__init__(env)
        self.rounds: list[list[str]] = []

    async def generate_together(
        self, prompts: dict[str, list[int]], *, seeds: dict[str, int], **_: Any
    ) -> dict[str, Turn]:
        self.rounds.append([name.partition(":")[2] for name in prompts])
        return {name: await self.generate(ids, seed=seeds[name]) for name, ids in prompts.items()}


@contextmanager
def hub_of(num_places: int) -> Iterator[Served]:
    registry = Registry(["wordle"])
    sessions = Sessions(registry, idle_s=600.0, capacity=num_places, step_timeout_s=10.0)
    app = make_app(sessions, registry, token=None, step_timeout_s=10.0)
    with serve(app, has_lifespan=True) as url:
        yield Served(url, sessions)


def leases_of(actor: int) -> list[Lease]:
    return [
        replace(lease_of("wordle"), episode_id=f"g{actor}/{n}", member=n, seed=100 * actor + n)
        for n in range(NUM_EPISODES)
    ]


async def play(
    hub: Served, engine: TogetherEngine, leases: list[Lease], *, knows_places: bool = True
) -> dict[str, Trajectory]:
    cfg = ActorSection(env_timeout_s=20.0, **options_of("full"))
    hubs = Hubs(lambda: [HubPlace(url=hub.url, token="", envs=["wordle"])], cfg, style="compact")
    await hubs.start()
    box = Box()
    together: Any = engine
    places = {"num_places": hubs.num_places} if knows_places else {}
    rounds = Rounds(together, max_tokens=60, exclusive=asyncio.Lock(), **places)
    parts: dict[str, Any] = {"engine": engine, "renderer": PlainLetters(), "delivery": box}
    episodes = EpisodePool(cfg, actor="a", environments=hubs, rounds=rounds, **parts)
    try:
        episodes.start(leases)
        while len(box.taken) < len(leases):
            episodes.slot_freed.clear()
            if episodes.failed.done():
                await episodes.failed
            await episodes.slot_freed.wait()
    finally:
        await episodes.cancel_all()
        await hubs.close()
    return {played.episode_id: played for played in box.taken}


def tokens_of(played: dict[str, Trajectory]) -> dict[str, list[int]]:
    return {name: trajectory.token_ids.tolist() for name, trajectory in played.items()}


def test_episodes_beyond_the_places_begin_as_others_end() -> None:
    async def law(hub: Served) -> tuple[dict[str, Trajectory], list[list[str]]]:
        engine = TogetherEngine("wordle")
        async with asyncio.timeout(20.0):
            return await play(hub, engine, leases_of(1)), engine.rounds

    with hub_of(2) as small, hub_of(100) as large:
        played, rounds = asyncio.run(law(small))
        again = asyncio.run(law(small))
        free, free_rounds = asyncio.run(law(large))
        assert small.sessions.counts["created"] == 2 * NUM_EPISODES
    assert rounds == again[1]  # The rounds do not depend on time.
    assert max(map(len, rounds)) == 2
    assert len(free_rounds[0]) == NUM_EPISODES
    assert tokens_of(played) == tokens_of(free) == tokens_of(again[0])


@pytest.mark.parametrize("knows_places", [True, False])
def test_actors_that_share_few_places_end_all_episodes(knows_places: bool) -> None:
    async def law(hub: Served) -> list[dict[str, Trajectory]]:
        async with asyncio.timeout(60.0):
            return await asyncio.gather(
                *(
                    play(hub, TogetherEngine("wordle"), leases_of(actor), knows_places=knows_places)
                    for actor in (1, 2)
                )
            )

    with hub_of(3) as small, hub_of(100) as large:
        played = asyncio.run(law(small))
        free = asyncio.run(law(large))
    assert [tokens_of(each) for each in played] == [tokens_of(each) for each in free]
