"""Load on a server of environments by a client process of its own.

The process is `python -m benchmarks.envhub.load`, with a job on its stdin.
"""

import asyncio
import json
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from itertools import count, cycle
from typing import Protocol

import numpy as np
import uvloop

from benchmarks.envhub.hub import Client, ServiceTarget
from common.repository import ROOT

JOB_TIMEOUT_S = 300.0
WARM_UP_S = 0.4
ACTIONS = {
    "textcraft": ("get 1 oak log", "inventory", "get 2 cobblestone", "craft 1 stick using 1 egg"),
    "babyai": ("turn left", "move forward", "turn right", "move forward"),
}
ITEMS = {"textcraft": "depth2-train-{}", "babyai": "GoToObjMazeS7-train-{}"}
NUM_ITEMS = 100  # Number of distinct items, used in turn.


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The steps of one client process, by several connections with one active request each."""

    target: ServiceTarget
    env: str = "textcraft"
    num_clients: int = 128
    duration_s: float = 1.5  # After a warm-up.
    base: str | None = None  # Path of AgentGym's routes; None: the hub's own routes.


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The steps of a job that were answered in its time, and their latencies."""

    duration_s: float
    latencies_ms: list[float]

    @property
    def per_s(self) -> float:
        return len(self.latencies_ms) / self.duration_s

    def percentile_ms(self, share: float) -> float:
        """Return the latency that a share of the steps did not exceed."""
        return float(np.quantile(self.latencies_ms, share, method="inverted_cdf"))


class Steps(Protocol):
    """An open episode of a server. A step returns whether the episode is over."""

    async def step(self, action: str) -> bool: ...
    async def close(self) -> None: ...


class HubEpisode:
    """A session of a hub."""

    def __init__(self, client: Client, session_id: str) -> None:
        self._client = client
        self._session_id = session_id
        self._seq = 0  # Number of steps so far.

    async def step(self, action: str) -> bool:
        self._seq += 1
        return (await self._client.step(self._session_id, action, self._seq))["done"]

    async def close(self) -> None:
        await self._client.delete(self._session_id)


class AgentGymEpisode:
    """An environment on AgentGym's routes."""

    def __init__(self, client: Client, base: str, number: int) -> None:
        self._client = client
        self._base = base
        self._number = number

    async def step(self, action: str) -> bool:
        content = {"id": self._number, "action": action}
        return (await self._client.want(200, "POST", f"{self._base}/step", content))["done"]

    async def close(self) -> None:
        """Do nothing, because clients of AgentGym never close an environment."""


async def open_episode(client: Client, job: Job, number: int) -> Steps:
    """Open an episode by the routes of a job."""
    if job.base is None:
        item_id = ITEMS[job.env].format(number % NUM_ITEMS)
        session_id, _ = await client.open(job.env, item_id)
        return HubEpisode(client, session_id)
    made = await client.want(200, "POST", f"{job.base}/create", {})
    return AgentGymEpisode(client, job.base, made["id"])


async def run_job(job: Job) -> Measured:
    """Run a job in this process. Its clock starts when all episodes are open."""
    numbers = count()
    latencies_ms: list[float] = []

    async def keep_stepping(client: Client, episode: Steps, begin_s: float, end_s: float) -> None:
        """Step one session until the time is over."""
        for action in cycle(ACTIONS[job.env]):
            sent_s = time.perf_counter()
            is_over = await episode.step(action)
            answered_s = time.perf_counter()
            if answered_s >= end_s:
                break
            if answered_s >= begin_s:
                latencies_ms.append((answered_s - sent_s) * 1e3)
            if is_over:
                await episode.close()
                episode = await open_episode(client, job, next(numbers))
        await episode.close()

    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(Client(job.target)) for _ in range(job.num_clients)
        ]
        episodes = [await open_episode(client, job, next(numbers)) for client in clients]
        begin_s = time.perf_counter() + WARM_UP_S
        clocks = (begin_s, begin_s + job.duration_s)
        pairs = zip(clients, episodes, strict=True)
        await asyncio.gather(*(keep_stepping(*pair, *clocks) for pair in pairs))
    if not latencies_ms:
        raise RuntimeError(f"no step was answered within {job.duration_s:g} s")
    return Measured(duration_s=job.duration_s, latencies_ms=latencies_ms)


def measure(job: Job) -> Measured:
    """Return the measurements of a client process. Raises: RuntimeError: it failed."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.envhub.load"],
        cwd=ROOT,
        input=json.dumps(asdict(job)).encode(),
        capture_output=True,
        timeout=JOB_TIMEOUT_S,
    )
    if done.returncode != 0:
        raise RuntimeError(f"client failed: {done.stderr.decode(errors='replace')[-1500:]}")
    return Measured(**json.loads(done.stdout))


if __name__ == "__main__":
    fields = json.load(sys.stdin)
    fields["target"] = ServiceTarget(**fields["target"])
    json.dump(asdict(uvloop.run(run_job(Job(**fields)))), sys.stdout)
