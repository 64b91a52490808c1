"""Load on a hub, or on the reference server.

It is a process: `python -m benchmarks.envhub.load` with a job on its stdin.
"""

import asyncio
import json
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import asdict
from itertools import count, cycle
from typing import Any

import uvloop

from benchmarks.envhub.client import Client, ServiceTarget
from benchmarks.envhub.job import ACTIONS, Job, Measured, Recorder
from benchmarks.envhub.keep_alive import run_raw

ITEMS = {"textcraft": "depth2-train-{}", "babyai": "GoToObjMazeS7-train-{}"}
NUM_ITEMS = 100  # Number of distinct items, used in turn.
NUM_ROUNDS = 3  # Rounds of opening, after one warm-up round.


class HubEpisode:
    """A session of a hub."""

    def __init__(self, client: Client, session_id: str) -> None:
        self._client = client
        self.session_id = session_id
        self.seq = 0  # Number of steps so far.

    @classmethod
    async def open(cls, client: Client, env: str, item_id: str) -> "HubEpisode":
        """Create and reset: one request."""
        session_id, _ = await client.open(env, item_id)
        return cls(client, session_id)

    async def step(self, action: str) -> bool:
        """Make a step; return whether the episode is over."""
        self.seq += 1
        return (await self._client.step(self.session_id, action, self.seq))["done"]

    async def close(self) -> None:
        await self._client.delete(self.session_id)


class ReferenceEpisode:
    """An environment of the reference server."""

    def __init__(self, client: Client, env: str, number: int) -> None:
        self._client = client
        self._env = env
        self._number = number

    @classmethod
    async def open(cls, client: Client, env: str, item_id: str) -> "ReferenceEpisode":
        """Create and reset: two requests."""
        made = await client.want(200, "POST", f"/{env}/create")
        episode = cls(client, env, made["id"])
        await episode._want("reset", item_id=item_id)
        return episode

    async def step(self, action: str) -> bool:
        """Make a step; return whether the episode is over."""
        return (await self._want("step", action=action))["done"]

    async def close(self) -> None:
        await self._want("close")

    async def _want(self, verb: str, **content: str) -> Any:
        path = f"/{self._env}/{verb}"
        answer = await self._client.want(200, "POST", path, {"id": self._number, **content})
        if isinstance(answer, dict) and answer.get("error"):
            raise RuntimeError(answer["error"])
        return answer


class Load:
    """The load of one job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._kind = ReferenceEpisode if job.is_reference else HubEpisode
        self._numbers = count()

    async def run(self) -> Measured:
        """Return the measurements of the job."""
        job = self._job
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(Client(job.target)) for _ in range(job.num_clients)
            ]
            is_stepping = job.kind == "step"
            return await (self._steps(clients) if is_stepping else self._opening(clients))

    def _item(self) -> str:
        return ITEMS[self._job.env].format(next(self._numbers) % NUM_ITEMS)

    async def _open(self, client: Client) -> HubEpisode | ReferenceEpisode:
        return await self._kind.open(client, self._job.env, self._item())

    async def _steps(self, clients: list[Client]) -> Measured:
        episodes = [await self._open(client) for client in clients]
        recorder = Recorder(self._job)

        async def keep_stepping(client: Client, episode: HubEpisode | ReferenceEpisode) -> None:
            for action in cycle(ACTIONS[self._job.env]):
                sent_s = time.perf_counter()
                is_over = await episode.step(action)
                goes_on = recorder.add(sent_s)
                if is_over or not goes_on:
                    await episode.close()
                if not goes_on:
                    return
                if is_over:
                    episode = await self._open(client)

        await asyncio.gather(*map(keep_stepping, clients, episodes))
        return recorder.measured()

    async def _opening(self, clients: list[Client]) -> Measured:
        """Open `num_clients` episodes at once, several times; closing them is not counted."""
        latencies_ms: list[float] = []
        took_s = 0.0
        for round_number in range(NUM_ROUNDS + 1):
            began_s = time.perf_counter()
            opened = await asyncio.gather(*map(self._open_timed, clients))
            if round_number > 0:  # The first round is a warm-up.
                took_s += time.perf_counter() - began_s
                latencies_ms += [took_ms for _, took_ms in opened]
            for episode, _ in opened:
                await episode.close()
        num_done = NUM_ROUNDS * self._job.num_clients
        return Measured(num_done=num_done, duration_s=took_s, latencies_ms=latencies_ms)

    async def _open_timed(self, client: Client) -> tuple[HubEpisode | ReferenceEpisode, float]:
        """Return a new episode and the milliseconds of its opening."""
        began_s = time.perf_counter()
        episode = await self._open(client)
        return episode, (time.perf_counter() - began_s) * 1e3


async def run_job(job: Job) -> Measured:
    """Run a job in this process."""
    if job.kind == "raw":
        return await run_raw(job)
    return await Load(job).run()


if __name__ == "__main__":
    fields = json.load(sys.stdin)
    fields["target"] = ServiceTarget(**fields["target"])
    json.dump(asdict(uvloop.run(run_job(Job(**fields)))), sys.stdout)
