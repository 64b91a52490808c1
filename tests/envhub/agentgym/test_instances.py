"""Laws of AgentGym's instances: idle limits, and one call at a time."""

import asyncio
import time
from collections import Counter
from dataclasses import replace
from typing import cast

import pytest

from common.config.envs import EnvsSection
from envhub.agentgym.replies import InstanceUnknown, NotReset
from envhub.agentgym.serve import Instances
from envhub.catalogue.registry import Registry
from envhub.env import EnvSpec, StepResult, Style, SubsetSpec
from envhub.errors import CapacityFull
from envhub.hosting.sessions import Sessions
from envhub.http.parts import AgentGymLimits
from tests.configs import edited
from tests.marks import WITH_PROCESSES, long_for


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def with_instances(play, *, idle_s: float = 10.0, queue_s: float = 0.0, capacity: int = 4):
    """Run `play(instances, sessions, clock)` on a Maze."""

    async def run():
        clock, registry = Clock(), Registry(["maze"])
        sessions = Sessions(
            registry, idle_s=idle_s, capacity=capacity, step_timeout_s=1.0, now_s=clock
        )
        limits = AgentGymLimits(idle_s=idle_s, queue_s=queue_s)
        spec = registry.spec("maze")
        instances = Instances(spec, sessions, limits=limits)
        try:
            return await play(instances, sessions, clock)
        finally:
            await sessions.stop()

    return asyncio.run(run())


def test_use_restarts_the_idle_time_and_disuse_ends_it():
    async def play(instances, sessions, clock):
        used, unused = instances.add(), instances.add()
        clock.now_s = 9.0
        instances.find(used)
        clock.now_s = 11.0
        instances.find(used)
        with pytest.raises(InstanceUnknown):
            instances.find(unused)
        await instances.expire()
        assert len(instances) == 1
        clock.now_s = 22.0
        await instances.expire()
        assert len(instances) == 0

    with_instances(play)


def test_instance_holds_one_session_until_it_closes():
    async def play(instances, sessions, clock):
        number = instances.add()
        for index in range(3):
            await instances.reset(number, index)
            assert len(sessions) == 1
        assert await instances.close(number)
        assert len(sessions) == 0
        assert not await instances.close(number)

    with_instances(play)


def test_expired_session_ends_episode_until_reset():
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


def test_concurrent_steps_of_instance_all_run():
    async def play(instances, sessions, clock):
        number = instances.add()
        await instances.reset(number, 0)
        steps = [instances.step(number, "move right", refuses_after_done=True) for _ in range(3)]
        results = [result.observation for _, result in await asyncio.gather(*steps)]
        assert ["position 1, 2" in results[0], "position 1, 4" in results[2]] == [True, True]
        assert sessions.num_steps == 3

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

    def now_s(self) -> float:
        return time.monotonic()

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
    return Instances(spec, cast(Sessions, sessions), limits=AgentGymLimits(idle_s=10.0)), sessions


def test_instance_closed_during_reset_leaves_no_session():
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


def test_step_after_a_concurrent_last_step_never_runs():
    async def play():
        instances, sessions = slow_instances()
        sessions.may_answer.set()
        number = instances.add()
        await instances.reset(number, 0)
        steps = [instances.step(number, "go", refuses_after_done=False) for _ in range(2)]
        assert {result.observation for _, result in await asyncio.gather(*steps)} == {"over"}
        assert sessions.num_steps == 1

    asyncio.run(play())


def test_full_pool_queues_clients_and_times_out_with_a_remedy():
    async def play(instances, sessions, clock):
        first = [await instances.add_in_turn() for _ in range(4)]
        for number in first:
            await instances.reset(number, 0)
        waiting = [asyncio.create_task(instances.add_in_turn()) for _ in range(3)]
        await asyncio.sleep(0.15)
        assert not any(task.done() for task in waiting)
        await instances.close(first[0])
        await waiting[0]  # the first to ask; its place is kept for its reset
        assert not waiting[1].done()
        clock.now_s = 11.0  # The waiting clients are gone.
        await asyncio.gather(*waiting)
        assert len(instances) == 2, "what nobody asked for is closed"
        assert sessions.num_live["maze"] == 0

    with_instances(play, queue_s=10.0)

    async def wait_in_vain(instances, sessions, clock):
        for _ in range(4):
            await instances.add_in_turn()
        with pytest.raises(CapacityFull, match=r"at most 4, .* Raise envhub\.capacity"):
            await instances.add_in_turn()

    with_instances(wait_in_vain, queue_s=0.2)


def test_suspended_episode_resumes_in_same_state():
    async def play():
        registry = Registry(["tests.envhub.outside:make_worker"])
        spec = replace(
            registry.spec("fragile"), max_workers=1, sessions_per_worker=2, from_agentgym=item
        )
        registry.spec = lambda name: spec
        sessions = Sessions(registry, idle_s=60.0, capacity=9, step_timeout_s=20.0)
        instances = Instances(spec, sessions, limits=AgentGymLimits(idle_s=60.0, queue_s=9.0))

        async def step(number, action="go"):
            return (await instances.step(number, action, refuses_after_done=True))[1].observation

        try:
            numbers = [await instances.add_in_turn() for _ in range(6)]
            for number in numbers:
                await instances.reset(number, 1)
                assert await step(number) == "step 1"
            for count in (2, 3):
                told = await asyncio.gather(*(step(number) for number in numbers))
                assert told == [f"step {count}"] * 6
            assert len(sessions) == 2
            await step(numbers[0], "x" * 100_000)  # too much to do it again: it stays
            await asyncio.gather(*(step(number) for number in numbers[1:]))
            assert instances.find(numbers[0]).session_id is not None
        finally:
            await sessions.stop()

    def item(index: int) -> str:
        return f"any-train-{index}"

    asyncio.run(play())


def test_ended_episode_frees_its_session_and_keeps_its_answer():
    async def play(instances, sessions, clock):
        numbers = [await instances.add_in_turn() for _ in range(4)]
        for number in numbers:
            await instances.reset(number, 0)
            while True:
                _, result = await instances.step(number, "move up", refuses_after_done=False)
                if result.done:
                    break
        more = [await instances.add_in_turn() for _ in range(4)]
        for number in more:
            await instances.reset(number, 1)
        _, again = await instances.step(numbers[0], "move up", refuses_after_done=False)
        assert again == result
        assert len(sessions) == 4

    with_instances(play, queue_s=5.0)


SERVED = {  # how many clients, options that leave little, and an action
    "textcraft": (128, {}, "get 1 oak log"),
    "babyai": (128, {}, "turn left"),
    "wordle": (128, {}, "s h i r e"),
    "maze": (128, {}, "move up"),
    "sqlgym": (128, {}, "SELECT 1"),
    "searchqa": (128, {}, "<search>city</search>"),
    "sciworld": (16, {"sciworld.max_jvms": 2}, "open door to kitchen"),  # 128 take some minutes
    "minisites": (8, {"browser.max_sessions": 2}, "```scroll [down]```"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", long_for(SERVED, WITH_PROCESSES))
def test_clients_without_close_fail_no_step_of_any_environment(name):
    num_clients, changes, action = SERVED[name]
    options = edited(EnvsSection(), changes)

    async def play():
        registry = Registry([name], options)
        sessions = Sessions(registry, idle_s=600.0, capacity=4096, step_timeout_s=60.0)
        limits = AgentGymLimits(idle_s=600.0, queue_s=300.0)
        instances = Instances(registry.spec(name), sessions, limits=limits)
        try:
            numbers = [await instances.add_in_turn() for _ in range(num_clients)]
            for index, number in enumerate(numbers):
                await instances.reset(number, index % 3)
            steps = (instances.step(each, action, refuses_after_done=False) for each in numbers)
            told = await asyncio.gather(*steps)
            assert all(result.observation for _, result in told)
            for number in numbers[:3]:  # Their steps waited for the suspended sessions.
                _, result = await instances.step(number, action, refuses_after_done=False)
                assert result.observation
        finally:
            await sessions.stop()

    asyncio.run(play())


@pytest.mark.slow
def test_rollouts_of_128_clients_without_close_fail_no_step():
    async def play(instances, sessions, clock):
        async def roll_out(index):
            for _ in range(2):  # batches
                number = await instances.add_in_turn()
                await instances.reset(number, index % 25)
                for _ in range(3):
                    await instances.step(number, "move up", refuses_after_done=True)

        async def pass_time():
            while True:
                await asyncio.sleep(0.02)
                clock.now_s += 5.0

        passing = asyncio.create_task(pass_time())
        await asyncio.gather(*(roll_out(index) for index in range(128)))
        passing.cancel()
        assert sessions.num_steps == 128 * 2 * 3

    with_instances(play, idle_s=40.0, queue_s=60.0, capacity=32)
