"""Laws of AgentGym's instances: leases, and one call at a time."""

import asyncio
from collections import Counter
from typing import cast

import pytest

from envhub.agentgym.instances import Instances, InstanceUnknown, NotReset
from envhub.catalogue.registry import Registry
from envhub.env import EnvSpec, StepResult, Style, SubsetSpec
from envhub.hosting.sessions import Sessions


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def with_instances(play, *, lease_s: float = 10.0):
    """Run `play(instances, sessions, clock)` on a Maze."""

    async def run():
        clock, registry = Clock(), Registry(["maze"])
        sessions = Sessions(registry, lease_s=lease_s, capacity=4, step_timeout_s=1.0, now_s=clock)
        instances = Instances(registry.spec("maze"), sessions, lease_s=lease_s, now_s=clock)
        try:
            return await play(instances, sessions, clock)
        finally:
            await sessions.stop()

    return asyncio.run(run())


def test_lease_is_renewed_by_use_and_ends_without():
    async def play(instances, sessions, clock):
        used, unused = instances.add(), instances.add()
        clock.now_s = 9.0
        instances.find(used)
        clock.now_s = 11.0
        instances.find(used)
        with pytest.raises(InstanceUnknown):
            instances.find(unused)
        instances.expire()
        assert len(instances) == 1
        clock.now_s = 22.0
        instances.expire()
        assert len(instances) == 0

    with_instances(play)


def test_reset_ends_the_previous_session_and_close_the_last():
    async def play(instances, sessions, clock):
        number = instances.add()
        for index in range(3):
            await instances.reset(number, index)
            assert len(sessions) == 1
        assert await instances.close(number)
        assert len(sessions) == 0
        assert not await instances.close(number)

    with_instances(play)


def test_session_whose_own_lease_ran_out_ends_the_episode():
    async def play(instances, sessions, clock):
        number = instances.add()
        instance = await instances.reset(number, 0)
        await sessions.delete(instance.session_id)
        with pytest.raises(InstanceUnknown):
            await instances.step(number, "move up", refuses_after_done=True)
        with pytest.raises(NotReset):
            await instances.step(number, "move up", refuses_after_done=True)
        await instances.reset(number, 0)
        await instances.step(number, "move up", refuses_after_done=True)

    with_instances(play)


def test_concurrent_steps_of_an_instance_are_all_performed():
    async def play(instances, sessions, clock):
        number = instances.add()
        await instances.reset(number, 0)
        steps = [instances.step(number, "move right", refuses_after_done=True) for _ in range(3)]
        results = [result.observation for _, result in await asyncio.gather(*steps)]
        assert ["position 1, 2" in results[0], "position 1, 4" in results[2]] == [True, True]
        assert sessions.counts["steps"] == 3

    with_instances(play)


class SlowSessions:
    """Sessions that answer when they are let, one step long."""

    def __init__(self) -> None:
        self.placement = self
        self.num_live: Counter[str] = Counter()
        self.may_answer = asyncio.Event()
        self.live: set[str] = set()
        self.num_steps = 0

    def capacity(self, spec: EnvSpec) -> int:
        return 10

    async def create(self, env: str, item_id: str, *, seed: int, style: Style) -> tuple[str, str]:
        await self.may_answer.wait()
        self.live.add(item_id)
        return item_id, "begun"

    async def step(self, session_id: str, action: str) -> StepResult:
        self.num_steps += 1
        await asyncio.sleep(0)
        return StepResult(observation="over", reward=1.0, done=True, is_valid=True)

    async def delete(self, session_id: str) -> None:
        self.live.remove(session_id)


def slow_instances() -> tuple[Instances, SlowSessions]:
    sessions = SlowSessions()
    spec = EnvSpec(
        name="slow",
        subsets={"any": SubsetSpec(num_train=1, num_test=1, max_turns=1)},
        instruction={},
        make=lambda _: pytest.fail("nobody plays it"),
        from_agentgym=lambda index: f"any-train-{index}",
    )
    return Instances(spec, cast(Sessions, sessions), lease_s=10.0), sessions


def test_instance_closed_during_its_reset_leaves_no_session():
    async def play():
        instances, sessions = slow_instances()
        number = instances.add()
        resetting = asyncio.create_task(instances.reset(number, 0))
        await asyncio.sleep(0)
        closing = asyncio.create_task(instances.close(number))
        await asyncio.sleep(0)
        sessions.may_answer.set()
        with pytest.raises(InstanceUnknown):
            await resetting
        assert await closing
        assert sessions.live == set()

    asyncio.run(play())


def test_second_of_two_last_steps_is_not_performed():
    async def play():
        instances, sessions = slow_instances()
        sessions.may_answer.set()
        number = instances.add()
        await instances.reset(number, 0)
        steps = [instances.step(number, "go", refuses_after_done=False) for _ in range(2)]
        assert {result.observation for _, result in await asyncio.gather(*steps)} == {"over"}
        assert sessions.num_steps == 1

    asyncio.run(play())
