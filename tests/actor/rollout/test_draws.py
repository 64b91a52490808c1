"""Laws of the random numbers of the episodes that an actor plays."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from actor.rollout.episode import Turn
from actor.rollout.lockstep import Rounds
from actor.rollout.pool import EpisodePool
from actor.seeds import SamplingSeeds, environment_seed
from common.config.actor import ActorSection
from common.wire.messages import EpisodeKind, Lease
from tests.actor.rollout.playing import LEASE, Count, Letters, go_on
from tests.actor.rollout.test_hubs import Box

NUM_TURNS = 3


class SeedKeeper:
    """An engine that answers "a" and keeps the seeds of each episode's requests."""

    version, frozen_s = 0, 0.0

    def __init__(self) -> None:
        self.seeds: defaultdict[str, list[int]] = defaultdict(list)

    async def generate(self, _: list[int], *, request_id: str, seed: int, **__: Any) -> Turn:
        self.seeds[request_id.partition(":")[0]].append(seed)
        return Turn([ord("a"), 0], [0.0, 0.0], [0, 0])

    async def generate_together(
        self, prompts: dict[str, list[int]], *, seeds: dict[str, int], **_: Any
    ) -> dict[str, Turn]:
        for request, seed in seeds.items():
            self.seeds[request.partition(":")[2]].append(seed)
        return {each: Turn([ord("a"), 0], [0.0, 0.0], [0, 0]) for each in prompts}


class SeededEnvironments:
    """Environments that never end and record the seeds of their sessions."""

    def __init__(self) -> None:
        self.seeds: list[int] = []

    async def open(self, _: str, __: str, *, seed: int, on_full: Any = None) -> Count:
        self.seeds.append(seed)
        return Count([go_on()])

    def instruction(self, _: str) -> str:
        return ""

    acknowledgement = instruction

    def opponent_texts(self, _: str) -> dict[str, str]:
        return {}

    def tools(self, _: str) -> list[Any]:
        return []

    def is_gone(self, _: str) -> bool:
        return False


class PlainLetters(Letters):
    def of(self, env: str, tools: Sequence[Any] = ()) -> "PlainLetters":
        return self


def group(num: int, **changes: Any) -> list[Lease]:
    return [
        replace(LEASE, episode_id=f"g/{n}", member=n, seed=100 + n, horizon=NUM_TURNS, **changes)
        for n in range(num)
    ]


def play(leases: list[Lease], *, is_lockstep: bool) -> tuple[dict[str, list[int]], list[int]]:
    """Return the sampling seeds of each episode, and the seeds of the environments."""
    engine, environments, box = SeedKeeper(), SeededEnvironments(), Box()
    together: Any = engine

    async def run() -> None:
        rounds = Rounds(together, max_tokens=8, exclusive=asyncio.Lock()) if is_lockstep else None
        parts: dict[str, Any] = {"renderer": PlainLetters(), "environments": environments}
        cfg = ActorSection()
        to: Any = box
        episodes = EpisodePool(cfg, actor="a", engine=together, delivery=to, rounds=rounds, **parts)
        episodes.start(leases)
        async with asyncio.timeout(10.0):
            while len(box.taken) < len(leases):
                episodes.slot_freed.clear()
                await episodes.slot_freed.wait()

    asyncio.run(run())
    return dict(engine.seeds), environments.seeds


@pytest.mark.parametrize("is_lockstep", [False, True])
def test_request_seed_depends_on_lease_and_turn(is_lockstep: bool) -> None:
    leases = group(3)
    sampled, _ = play(leases, is_lockstep=is_lockstep)
    for lease in leases:
        seeds = SamplingSeeds(lease)
        assert sampled[lease.episode_id] == [seeds.next() for _ in range(NUM_TURNS)]
    assert len({seed for own in sampled.values() for seed in own}) == 3 * NUM_TURNS


def test_reissued_member_draws_the_same_numbers() -> None:
    leases = group(2)
    first, _ = play(leases, is_lockstep=False)
    again, _ = play([replace(leases[1], attempt=1)], is_lockstep=True)
    assert again == {"g/1": first["g/1"]}


def test_group_members_share_one_environment_seed() -> None:
    leases = group(3)
    _, opened = play(leases, is_lockstep=False)
    assert opened == [environment_seed(leases[0])] * 3


def test_held_out_episodes_have_own_environment_seeds() -> None:
    _, opened = play(group(2, kind=EpisodeKind.EVAL), is_lockstep=False)
    assert sorted(opened) == [100, 101]
