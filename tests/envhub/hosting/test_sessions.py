"""Laws of the table of sessions, without HTTP."""

import asyncio
import os
import time

import pytest

from common.errors import EnvTimeout
from envhub.catalogue.registry import Registry
from envhub.errors import CapacityFull, EnvRaised, HubDraining, SessionConflict, SessionUnknown
from envhub.hosting import sessions as sessions_module
from envhub.hosting.sessions import Sessions
from tests.envhub import outside
from tests.envhub.conftest import live_session


def play(episode, *, envs=("waiting", "faulty"), **changes):
    """Run a coroutine function on a fresh table and stop the table."""

    async def run():
        limits = {"idle_s": 60.0, "capacity": 10, "step_timeout_s": 60.0}
        sessions = Sessions(Registry(list(envs)), **(limits | changes))
        try:
            return await episode(sessions)
        finally:
            await sessions.stop()

    outside.closed.clear()
    return asyncio.run(run())


def test_step_without_a_number_is_the_next():
    async def episode(sessions):
        session_id, _ = await sessions.create("faulty", "any-train-0")
        await sessions.step(session_id, "go")
        await sessions.step(session_id, "go", 2)
        return (await sessions.step(session_id, "go")).observation

    assert play(episode) == "step 3"


def test_overdue_call_ends_its_session():
    async def episode(sessions):
        session_id, _ = await sessions.create("waiting", "any-train-0")
        live_session(sessions, session_id).episode._timeout_s = 0.1
        with pytest.raises(EnvTimeout, match=r"waiting: no answer within 0\.1 s"):
            await sessions.step(session_id, "wait", 1)
        with pytest.raises(SessionUnknown):
            await sessions.step(session_id, "go", 1)
        return len(sessions), sessions.num_live["waiting"], sessions.counts["timed_out"]

    assert play(episode) == (0, 0, 1)


def test_waiting_call_does_not_block_other_sessions():
    async def episode(sessions):
        slow, _ = await sessions.create("waiting", "any-train-0")
        quick, _ = await sessions.create("waiting", "any-train-0")
        waiting = asyncio.create_task(sessions.step(slow, "wait", 1))
        await asyncio.sleep(0)
        assert (await sessions.step(quick, "go", 1)).observation == "step 1"
        assert not waiting.done()
        waiting.cancel()

    play(episode)


def test_calls_of_one_session_run_serially():
    async def episode(sessions):
        session_id, _ = await sessions.create("waiting", "any-train-0")
        steps = [sessions.step(session_id, "pause", seq) for seq in (1, 2)]
        (first, second), deleted = await asyncio.gather(
            asyncio.gather(*steps), sessions.delete(session_id)
        )
        assert not isinstance(first, BaseException)
        assert not isinstance(second, BaseException)
        return first.observation, second.observation, deleted, len(sessions)

    assert play(episode) == ("step 1", "step 2", None, 0)


def test_step_queued_behind_a_delete_finds_no_session():
    async def episode(sessions):
        session_id, _ = await sessions.create("waiting", "any-train-0")
        calls = [sessions.step(session_id, "pause", 1), sessions.delete(session_id)]
        results = await asyncio.gather(
            *calls, sessions.step(session_id, "go", 2), return_exceptions=True
        )
        return type(results[2])

    assert play(episode) is SessionUnknown


def test_running_call_prevents_session_expiry():
    now_s = [0.0]

    async def episode(sessions):
        session_id, _ = await sessions.create("waiting", "any-train-0")
        step = asyncio.create_task(sessions.step(session_id, "pause", 1))
        await asyncio.sleep(0)
        now_s[0] = 100.0
        assert await sessions.expire() == 0
        await step
        now_s[0] = 159.0  # the idle time counts from the end of the call
        assert await sessions.expire() == 0
        now_s[0] = 161.0
        return await sessions.expire()

    assert play(episode, now_s=lambda: now_s[0]) == 1


@pytest.mark.parametrize("env", ["waiting", "faulty"])
def test_every_episode_is_closed_once(env):
    async def episode(sessions):
        first, second, _ = [(await sessions.create(env, "any-train-0"))[0] for _ in range(3)]
        await sessions.step(first, "deleted", 1)
        await sessions.delete(first)
        with pytest.raises(EnvRaised):
            await sessions.step(second, "raise", 1)

    play(episode)
    assert outside.closed == ["deleted", "raise", ""]  # the last when the hub stops


def test_failed_creation_takes_no_place():
    async def episode(sessions):
        for _ in range(3):
            with pytest.raises(ValueError, match="the last is 'any-train-9'"):
                await sessions.create("faulty", "any-train-99")
        return sessions.num_live["faulty"], len(sessions)

    assert play(episode, capacity=1) == (0, 0)
    assert outside.closed == ["", "", ""]


def test_drain_waits_for_calls_and_refuses_new_sessions():
    async def episode(sessions):
        session_id, _ = await sessions.create("waiting", "any-train-0")
        step = asyncio.create_task(sessions.step(session_id, "pause", 1))
        await asyncio.sleep(0)
        draining = asyncio.create_task(sessions.drain(5.0))
        await asyncio.sleep(0)
        assert not draining.done()
        with pytest.raises(HubDraining):
            await sessions.create("faulty", "any-train-0")
        await draining
        return step.done()

    assert play(episode)


def test_drain_is_bounded():
    async def episode(sessions):
        session_id, _ = await sessions.create("waiting", "any-train-0")
        step = asyncio.create_task(sessions.step(session_id, "wait", 1))
        await asyncio.sleep(0)
        async with asyncio.timeout(30.0):
            await sessions.drain(0.05)
        step.cancel()

    play(episode)


def test_hub_stop_reaches_its_own_environments():
    async def episode(sessions):
        await sessions.create("waiting", "any-train-0")

    outside.stopped.clear()
    play(episode)
    assert outside.stopped == ["task"]


def test_step_after_the_end_conflicts():
    async def episode(sessions):
        session_id, _ = await sessions.create("waiting", "any-train-0")
        await sessions.step(session_id, "end", 1)
        with pytest.raises(SessionConflict, match="the episode ended at seq 1"):
            await sessions.step(session_id, "go", 2)

    play(episode)


def test_abandoned_sessions_leave_nothing_behind():
    now_s = [0.0]

    async def episode(sessions):
        for _ in range(20):
            for _ in range(10):
                await sessions.create("faulty", "any-train-0")
            now_s[0] += 61.0
            await sessions.expire()
        return len(sessions), sessions.num_live["faulty"], sessions.counts["expired"]

    assert play(episode, now_s=lambda: now_s[0]) == (0, 0, 200)
    assert len(outside.closed) == 200


def test_second_disconnect_restarts_the_time_to_come_back(monkeypatch):
    monkeypatch.setattr(sessions_module, "GONE_S", 0.05)

    async def episode(sessions):
        await sessions.create("faulty", "any-train-0", owner="a")
        with sessions.owned_by("a"):
            pass
        first = sessions._leaving["a"]
        with sessions.owned_by("a"):
            assert first.cancelled()
        assert sessions._leaving["a"].when() > first.when()
        async with asyncio.timeout(60):
            while len(sessions):
                await asyncio.sleep(0.01)
        return sessions.counts["abandoned"]

    assert play(episode) == 1


@pytest.mark.parametrize("env", ["faulty", "waiting", "fragile"])
def test_lone_surrogate_is_replaced_and_counted_everywhere(env):
    async def episode(sessions):
        session_id, _ = await sessions.create(env, "any-train-0")
        said = (await sessions.step(session_id, "half")).observation
        with pytest.raises(EnvRaised):
            await sessions.step(session_id, "raise half")
        return said, sessions.counts["repaired"]

    envs = ["faulty", "waiting", "tests.envhub.outside:make_worker"]
    assert play(episode, envs=envs) == ("step 1 \ufffd", 1)


def test_slow_environment_moves_to_worker_processes(caplog):
    async def episode(sessions):
        old, began = await sessions.create("lingering", "any-train-0")
        assert str(os.getpid()) in began
        for seq in (1, 2, 3):  # Each step blocks the event loop for 0.15 s.
            assert await longest_rest_s(sessions.step(old, "slow", seq)) > 0.1
        outside.has_begun.clear()
        outside.loop_runs.clear()
        step = asyncio.create_task(sessions.step(old, "await the loop", 4))
        async with asyncio.timeout(60):
            while not outside.has_begun.is_set():
                await asyncio.sleep(0.005)
        outside.loop_runs.set()
        assert (await step).observation == "step 4"
        both = await asyncio.gather(*(sessions.step(old, "go", 5) for _ in range(2)))
        assert [each.observation for each in both] == ["step 5"] * 2, "one step, its answer twice"
        new, began = await sessions.create("lingering", "any-train-0")
        assert str(os.getpid()) not in began
        assert (await sessions.step(new, "slow", 1)).observation == "step 1"
        assert list(sessions.placement.inline.moved) == ["lingering"]
        return sessions.num_steps

    assert play(episode, envs=["lingering"], inline_step_s=0.05) == 6
    told = [each for each in caplog.messages if "moved to worker processes env=lingering" in each]
    assert len(told) == 1


async def longest_rest_s(work):
    """Return the longest pause of the event loop during a call."""
    task, longest_s, seen_s = asyncio.ensure_future(work), 0.0, time.monotonic()
    while not task.done():
        await asyncio.sleep(0.005)
        longest_s, seen_s = max(longest_s, time.monotonic() - seen_s), time.monotonic()
    await task
    return longest_s


def test_token_limits_sessions_over_all_environments():
    async def episode(sessions):
        held = [await sessions.create(env, "any-train-0") for env in ("faulty", "waiting")]
        with pytest.raises(CapacityFull, match="all sessions of the hub are in use"):
            await sessions.create("faulty", "any-train-0")
        await sessions.delete(held[0][0])
        await sessions.create("waiting", "any-train-0")

    play(episode, max_sessions=2)
