"""A worker killed under load takes its own sessions with it and nothing else."""

import asyncio
import os
import signal
import time
from dataclasses import dataclass, field

import pytest

from benchmarks.envhub.hub import Client, HubAnswer, ServiceTarget, hub_process
from tests.bounds import at_most
from tests.end_to_end.hubs import OUTSIDE, run, worker_pids
from tests.end_to_end.outside_env import MAX_WORKERS, SESSIONS_PER_WORKER

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timed, pytest.mark.timeout(120)]

MAX_REPLACED_S = 2.0
MAX_ANSWER_S = 2.0
NUM_PLACES = MAX_WORKERS * SESSIONS_PER_WORKER


@dataclass(slots=True)
class Loaded:
    """A session under load: which process holds it, and what its steps met."""

    env: str
    pid: int
    num_steps: int = 0
    longest_s: float = 0.0
    ended_with: list[int] = field(default_factory=list[int])


async def keep_stepping(
    target: ServiceTarget, loaded: Loaded, session_id: str, stop: asyncio.Event
):
    async with Client(target) as client:
        while not stop.is_set():
            began_s = time.monotonic()
            try:
                await client.step(session_id, "inventory", loaded.num_steps + 1)
            except HubAnswer as error:
                loaded.ended_with.append(error.status)
                return
            finally:
                loaded.longest_s = max(loaded.longest_s, time.monotonic() - began_s)
            loaded.num_steps += 1


async def open_all(client: Client) -> dict[str, Loaded]:
    """Fill every place of the workers, and open some sessions in the hub's own process."""
    opened: dict[str, Loaded] = {}
    for number in range(NUM_PLACES):
        session_id, text = await client.open("outside", f"any-train-{number}")
        opened[session_id] = Loaded("outside", int(text.removeprefix("pid ")))
    for number in range(8):
        session_id, _ = await client.open("textcraft", f"depth1-train-{number}")
        opened[session_id] = Loaded("textcraft", 0)
    return opened


async def open_after(client: Client) -> tuple[float, int]:
    """Return how long it took until a session could be opened again, and in which process."""
    began_s = time.monotonic()
    while True:
        try:
            _, text = await client.open("outside", "any-train-0")
        except HubAnswer as error:
            if error.status != 429 or time.monotonic() - began_s > 10:
                raise
            await asyncio.sleep(0.02)
            continue
        return time.monotonic() - began_s, int(text.removeprefix("pid "))


async def kill_under_load(target: ServiceTarget) -> tuple[list[Loaded], int, float, int]:
    stop = asyncio.Event()
    async with Client(target) as client:
        opened = await open_all(client)
        tasks = [
            asyncio.create_task(keep_stepping(target, each, session_id, stop))
            for session_id, each in opened.items()
        ]
        await asyncio.sleep(1.0)  # load, not readiness
        killed = next(each.pid for each in opened.values() if each.pid)
        os.kill(killed, signal.SIGKILL)
        before = {id(each): each.num_steps for each in opened.values()}
        replaced_s, new_pid = await open_after(client)
        await asyncio.sleep(1.0)
        stop.set()
        async with asyncio.timeout(10):
            await asyncio.gather(*tasks)
    survivors = [each for each in opened.values() if each.pid != killed]
    assert all(each.num_steps > before[id(each)] for each in survivors)
    return list(opened.values()), killed, replaced_s, new_pid


def test_killed_worker_takes_only_its_own_sessions() -> None:
    with hub_process(["textcraft", OUTSIDE]) as hub:
        sessions, killed, replaced_s, new_pid = run(kill_under_load(hub.target))
        lost = [each for each in sessions if each.pid == killed]
        assert len(lost) == SESSIONS_PER_WORKER
        assert all(each.ended_with and each.ended_with[0] == 500 for each in lost)
        assert all(each.ended_with == [] for each in sessions if each.pid != killed)
        assert new_pid not in {each.pid for each in sessions}
        assert replaced_s < at_most(MAX_REPLACED_S)
        assert max(each.longest_s for each in sessions) < at_most(MAX_ANSWER_S)
        assert len(worker_pids(hub)) == MAX_WORKERS
    assert all(not _is_running(each.pid) for each in sessions if each.pid)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
