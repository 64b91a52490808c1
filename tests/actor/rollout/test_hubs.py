"""Laws of several hubs that serve one run, against real servers."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from actor.rollout.hubs import Hubs
from actor.rollout.pool import EpisodePool
from common.config.actor import ActorSection
from common.errors import EnvError
from common.formats.scripted import actions_of
from common.wire.messages import EndReason, EpisodeKind, HubPlace, Lease, PolicyKind, Trajectory
from tests.actor.toy_servers import ToyHub, serve
from tests.ports import free_port

DEAD = "http://127.0.0.1:1"


def place(url: str, *envs: str) -> HubPlace:
    return HubPlace(url=url, token="t", envs=list(envs or ("toy",)))


def play(
    places: list[HubPlace],
    law: Callable[[Hubs], Awaitable[None]],
    *,
    patience_s: float = 600.0,
    answer_s: float = 10.0,
) -> None:
    async def run() -> None:
        cfg = ActorSection(env_timeout_s=answer_s, episode_timeout_s=patience_s)
        hubs = Hubs(lambda: places, cfg, style="compact")
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


def test_sessions_spread_over_hubs_of_an_environment() -> None:
    first, second = ToyHub(), ToyHub()

    async def law(hubs: Hubs) -> None:
        assert hubs.instruction("toy") == "Play."
        assert await open_many(hubs, 6) == [f"begin a-test-{i}" for i in range(6)]

    with serve(first.app()) as a, serve(second.app()) as b:
        play([place(a), place(b), place("http://127.0.0.1:2", "another")], law)
    assert (len(first.opened), len(second.opened)) == (3, 3)


def test_other_hubs_replace_a_dead_hub() -> None:
    hub = ToyHub()
    places = [place(DEAD)]

    async def law(hubs: Hubs) -> None:
        places.append(place(DEAD))
        assert len(await open_many(hubs, 3)) == 3

    with serve(hub.app()) as url:
        places.append(place(url))
        play(places, law)
    assert len(hub.opened) == 3


@pytest.mark.slow
def test_full_hub_is_waited_for_beyond_one_request(caplog: pytest.LogCaptureFixture) -> None:
    hub = ToyHub(num_full=60)  # At least 0.05 s each.

    async def law(hubs: Hubs) -> None:
        assert await open_many(hubs, 1) == ["begin a-test-0"]

    with serve(hub.app()) as url:
        play([place(url)], law, answer_s=2.0)
    assert hub.num_full == 0
    assert caplog.text.count("episodes wait for a free session env=toy reason=full") == 1


@pytest.mark.slow
def test_full_hub_is_waited_for_beside_a_broken_one() -> None:
    full, broken = ToyHub(num_full=60), ToyHub(is_broken=True)

    async def law(hubs: Hubs) -> None:
        assert await open_many(hubs, 1) == ["begin a-test-0"]

    with serve(full.app()) as a, serve(broken.app()) as b:
        play([place(a), place(b)], law, answer_s=2.0)
    assert full.num_full == 0


def test_actor_follows_a_moved_hub() -> None:
    before, after = ToyHub(), ToyHub()

    with serve(before.app()) as old, serve(after.app()) as new:
        places = [place(old)]

        async def law(hubs: Hubs) -> None:
            await open_many(hubs, 1)
            places[:] = [place(new)]
            await open_many(hubs, 2)

        play(places, law)
    assert (len(before.opened), len(after.opened)) == (1, 2)


def test_environment_without_a_hub_raises_by_name() -> None:
    async def law(hubs: Hubs) -> None:
        with pytest.raises(EnvError, match="no hub serves chess"):
            await hubs.open("chess", "item-x", seed=0)

    with serve(ToyHub().app()) as url:
        play([place(url)], law)


def test_actor_without_any_hub_does_not_start() -> None:
    async def law(_: Hubs) -> None: ...

    with pytest.raises(EnvError, match="4 tries"):
        play([place(DEAD)], law)


class Box:
    """A delivery that keeps what it is given."""

    def __init__(self) -> None:
        self.taken: list[Trajectory] = []

    async def put(self, trajectory: Trajectory) -> None:
        self.taken.append(trajectory)


def lease_of(number: int, *, deadline_s: float = 60.0) -> Lease:
    return Lease(
        episode_id=f"g/{number}",
        group_id="g",
        member=number,
        attempt=0,
        kind=EpisodeKind.TRAIN,
        policy=PolicyKind.EXPERT,
        env="toy",
        item_id=f"a-test-{number}",
        seed=0,
        horizon=3,
        horizon_stage=0,
        opened_at_version=0,
        deadline_s=deadline_s,
    )


def start_episodes(hubs: Hubs, box: Any, num: int, *, deadline_s: float = 60.0) -> EpisodePool:
    nobody: Any = None
    episodes = EpisodePool(
        ActorSection(env_timeout_s=10.0),
        actor="a",
        engine=nobody,
        renderer=nobody,
        environments=hubs,
        delivery=box,
        rounds=None,
    )
    episodes.start([lease_of(i, deadline_s=deadline_s) for i in range(num)])
    return episodes


@pytest.mark.slow
def test_episodes_wait_past_deadlines_for_missing_hubs() -> None:
    """Another hub serves other environments, so leases continue; the hub of these is missing."""
    hub, other, box = ToyHub(), ToyHub(), Box()

    with serve(hub.app()) as a, serve(other.app()) as b:
        places = [place(a), place(b, "another")]

        async def law(hubs: Hubs) -> None:
            await open_many(hubs, 1)
            del places[0]
            episodes = start_episodes(hubs, box, 3, deadline_s=4.0)
            await asyncio.sleep(4.5)  # beyond what an episode may take
            assert len(episodes.running_ids) == 3
            places.append(place(a))
            while episodes.running_ids:
                await asyncio.sleep(0.01)

        play(places, law)
    assert [(t.end_reason, t.is_success) for t in box.taken] == [(EndReason.DONE, True)] * 3
    assert all(len(actions_of(each)) == each.num_turns for each in box.taken)


def test_permanently_lost_hub_frees_slots_then_fails() -> None:
    box = Box()

    with serve(ToyHub().app()) as a, serve(ToyHub().app()) as b:
        places = [place(a), place(b, "another")]

        async def law(hubs: Hubs) -> None:
            await open_many(hubs, 1)
            assert hubs.absent() == []
            del places[0]
            assert hubs.absent() == ["toy"]
            episodes = start_episodes(hubs, box, 3)
            while episodes.num_free_slots < episodes.num_slots:
                await asyncio.sleep(0)
            assert len(episodes.running_ids) == 3
            while episodes.running_ids:
                await asyncio.sleep(0.01)
            assert hubs.absent() == []  # New leases fail immediately.
            episodes.start([lease_of(3)])
            while episodes.running_ids:
                await asyncio.sleep(0.01)

        play(places, law, patience_s=1.0)
    assert [each.end_reason for each in box.taken] == [EndReason.ENV_ERROR] * 4
    assert "no hub that serves toy answers" in box.taken[0].error


@pytest.mark.slow
def test_episodes_restart_after_their_hub_returns() -> None:
    """The hub is down for longer than a request is retried, and loses its sessions."""
    before, after, box = ToyHub(step_s=0.2), ToyHub(), Box()

    async def law(hubs: Hubs) -> None:
        episodes = start_episodes(hubs, box, 5)
        while len(before.opened) < 5:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(servers.close)
        while not hubs.waiting_for:
            await asyncio.sleep(0.01)
        assert hubs.waiting_for == f"envhub: {url} does not answer"
        servers.enter_context(serve(after.app(), port=port))
        while episodes.running_ids:
            await asyncio.sleep(0.01)
        assert hubs.waiting_for == ""

    with contextlib.ExitStack() as servers:
        port = free_port()
        url = servers.enter_context(serve(before.app(), port=port))
        play([place(url)], law)
    assert sorted(t.episode_id for t in box.taken) == [f"g/{i}" for i in range(5)]
    assert {(t.end_reason, t.is_success) for t in box.taken} == {(EndReason.DONE, True)}
    assert len(after.opened) == 5


def test_vanished_sessions_eventually_fail_the_episode() -> None:
    hub, box = ToyHub(), Box()

    class Forgetful(dict[str, int]):
        def __contains__(self, name: object) -> bool:
            return False

    hub.turns = Forgetful()

    async def law(hubs: Hubs) -> None:
        episodes = start_episodes(hubs, box, 1)
        while episodes.running_ids:
            await asyncio.sleep(0.01)

    with serve(hub.app()) as url:
        play([place(url)], law)
    (trajectory,) = box.taken
    assert trajectory.end_reason is EndReason.ENV_ERROR
    assert "no such session" in trajectory.error
    assert len(hub.opened) == 5
