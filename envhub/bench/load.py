"""Load on a hub or on the reference server; a job on the stdin of `python -m envhub.bench.load`."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

import uvloop

from envhub.bench.client import Client, HubAnswer, Target
from envhub.bench.hub import ROOT

ITEMS = {"textcraft": "depth2-train-{}", "babyai": "GoToObjMazeS7-train-{}"}
NUM_ITEMS = 100  # distinct ones in turn
ACTIONS = {
    "textcraft": ("get 1 oak log", "inventory", "get 2 cobblestone", "craft 1 stick using 1 egg"),
    "babyai": ("turn left", "move forward", "turn right", "move forward"),
}
DONE = (b'"done": true', b'"done":true')
FAILED = (b'"error":"', b'"error": "')
NUM_ROUNDS = 3  # of opening, after one that warms up
JOB_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One measurement of one client process.

    Attributes:
        kind: step (single steps), open (creation and reset), batch and batch_open (the same by the
            batch routes, hub only).
        is_reference: the target speaks the reference server's routes.
        num_clients: connections with one request under way each; in `batch`, sessions of a call.
        warmup_s: seconds before counting begins.
        duration_s: seconds that count; `open` counts whole rounds instead and ignores both.
    """

    target: Target
    kind: str
    is_reference: bool
    env: str
    num_clients: int
    warmup_s: float = 0.4
    duration_s: float = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a job counted: operations, over what time, and how long each request took."""

    num_done: int
    duration_s: float
    latencies_ms: list[float]

    @property
    def per_s(self) -> float:
        """Operations per second."""
        return self.num_done / self.duration_s

    def percentile_ms(self, frac: float) -> float:
        """Return the latency that `frac` of the requests did not exceed."""
        ordered = sorted(self.latencies_ms)
        return ordered[min(len(ordered) - 1, int(frac * len(ordered)))]


def measure(job: Job) -> Measured:
    """Return what a client process of its own measured.

    Raises:
        RuntimeError: it failed; holds its last words.
    """
    done = subprocess.run(
        [sys.executable, "-m", "envhub.bench.load"],
        cwd=ROOT,
        input=json.dumps(asdict(job)).encode(),
        capture_output=True,
        timeout=JOB_TIMEOUT_S,
    )
    if done.returncode != 0:
        raise RuntimeError(f"client failed: {done.stderr.decode(errors='replace')[-1500:]}")
    return Measured(**json.loads(done.stdout))


@dataclass(slots=True, kw_only=True)
class Episode:
    """An episode under load; `head` is its step request up to the content's length."""

    session_id: str
    head: bytes
    seq: int = 0


class HubRoutes:
    """The hub's own routes."""

    def __init__(self, job: Job) -> None:
        self._job = job

    async def open(self, client: Client, number: int) -> Episode:
        """Create and reset: one request."""
        item_id = ITEMS[self._job.env].format(number % NUM_ITEMS)
        session_id, _ = await client.open(self._job.env, item_id)
        path = f"/v1/sessions/{session_id}/step"
        return Episode(session_id=session_id, head=self._job.target.head("POST", path))

    def step_body(self, episode: Episode, action: str) -> bytes:
        """Return the body of the next step."""
        episode.seq += 1
        return b'{"action":"%s","seq":%d}' % (action.encode(), episode.seq)

    async def close(self, client: Client, episode: Episode) -> None:
        """End an episode."""
        await client.delete(episode.session_id)


class ReferenceRoutes:
    """The routes of `envhub.bench.reference`."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._head = job.target.head("POST", f"/{job.env}/step")

    async def open(self, client: Client, number: int) -> Episode:
        """Create and reset: two requests."""
        env = self._job.env
        made = await client.want(200, "POST", f"/{env}/create")
        item_id = ITEMS[env].format(number % NUM_ITEMS)
        begun = {"id": made["id"], "item_id": item_id}
        answer = await client.want(200, "POST", f"/{env}/reset", begun)
        if answer["error"]:
            raise RuntimeError(answer["error"])
        return Episode(session_id=str(made["id"]), head=self._head)

    def step_body(self, episode: Episode, action: str) -> bytes:
        """Return the body of the next step."""
        return b'{"action":"%s","id":%s}' % (action.encode(), episode.session_id.encode())

    async def close(self, client: Client, episode: Episode) -> None:
        """End an episode."""
        path = f"/{self._job.env}/close"
        await client.want(200, "POST", path, {"id": int(episode.session_id)})


Routes = HubRoutes | ReferenceRoutes


class Recorder:
    """Latencies of the requests that end within the counted time."""

    def __init__(self, job: Job) -> None:
        self.begin_s = time.perf_counter() + job.warmup_s
        self.end_s = self.begin_s + job.duration_s
        self.latencies_ms: list[float] = []

    def add(self, sent_s: float, answered_s: float) -> bool:
        """Count a request; return whether to go on."""
        if self.begin_s <= answered_s < self.end_s:
            self.latencies_ms.append((answered_s - sent_s) * 1e3)
        return answered_s < self.end_s


async def run_job(job: Job) -> Measured:
    """Return what this process measures."""
    routes = ReferenceRoutes(job) if job.is_reference else HubRoutes(job)
    kinds: dict[str, Callable[[Job, Routes], Awaitable[Measured]]] = {
        "step": _measure_steps,
        "open": _measure_opening,
        "batch": _measure_batches,
        "batch_open": _measure_batch_opening,
    }
    return await kinds[job.kind](job, routes)


async def _measure_steps(job: Job, routes: Routes) -> Measured:
    numbers = count()
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Client(job.target)) for _ in _each(job)]
        episodes = [await routes.open(client, next(numbers)) for client in clients]
        recorder = Recorder(job)
        pairs = zip(clients, episodes, strict=True)
        loops = [_keep_stepping(job, routes, recorder, *pair, numbers) for pair in pairs]
        episodes = await asyncio.gather(*loops)
        for client, episode in zip(clients, episodes, strict=True):
            await routes.close(client, episode)
    num_done = len(recorder.latencies_ms)
    return Measured(
        num_done=num_done, duration_s=job.duration_s, latencies_ms=recorder.latencies_ms
    )


def _each(job: Job) -> range:
    return range(job.num_clients)


async def _keep_stepping(
    job: Job,
    routes: Routes,
    recorder: Recorder,
    client: Client,
    episode: Episode,
    numbers: Iterator[int],
) -> Episode:
    """Step one episode after the other until the time is over; return the last one."""
    connection = await client.connect()
    actions = ACTIONS[job.env]
    for turn in count():
        body = routes.step_body(episode, actions[turn % len(actions)])
        sent_s = time.perf_counter()
        status, answer = await connection.exchange(episode.head, body)
        answered_s = time.perf_counter()
        if status != 200 or any(mark in answer for mark in FAILED):
            raise HubAnswer(status, answer, request="step")
        if not recorder.add(sent_s, answered_s):
            return episode
        if any(mark in answer for mark in DONE):
            await routes.close(client, episode)
            episode = await routes.open(client, next(numbers))
    raise AssertionError("unreachable: turns have no end")


async def _measure_opening(job: Job, routes: Routes) -> Measured:
    """Open `num_clients` episodes at once, several times; closing them is not counted."""
    numbers = count()
    latencies_ms: list[float] = []
    took_s = 0.0

    async def open_timed(client: Client, number: int) -> Episode:
        began_s = time.perf_counter()
        episode = await routes.open(client, number)
        latencies_ms.append((time.perf_counter() - began_s) * 1e3)
        return episode

    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Client(job.target)) for _ in _each(job)]
        for round_number in range(NUM_ROUNDS + 1):
            if round_number == 1:  # the first one warms up
                latencies_ms.clear()
                took_s = 0.0
            began_s = time.perf_counter()
            opening = [open_timed(client, next(numbers)) for client in clients]
            episodes = await asyncio.gather(*opening)
            took_s += time.perf_counter() - began_s
            for client, episode in zip(clients, episodes, strict=True):
                await routes.close(client, episode)
    return Measured(num_done=len(latencies_ms), duration_s=took_s, latencies_ms=latencies_ms)


async def _measure_batches(job: Job, routes: Routes) -> Measured:
    """Step `num_clients` sessions of one connection with one request each time."""
    numbers = count()
    actions = ACTIONS[job.env]
    num_done = 0
    async with Client(job.target) as client:
        episodes = [await routes.open(client, next(numbers)) for _ in _each(job)]
        recorder = Recorder(job)
        for turn in count():
            steps = [_next_step(each, actions[turn % len(actions)]) for each in episodes]
            sent_s = time.perf_counter()
            status, body = await client.ask("POST", "/v1/step/batch", steps)
            num_before = len(recorder.latencies_ms)
            goes_on = recorder.add(sent_s, time.perf_counter())
            num_done += (len(recorder.latencies_ms) - num_before) * len(episodes)
            for i, result in enumerate(_entries(status, body, 200)):
                if result["done"]:
                    episodes[i] = await routes.open(client, next(numbers))
            if not goes_on:
                break
        for episode in episodes:
            await routes.close(client, episode)
    return Measured(
        num_done=num_done, duration_s=job.duration_s, latencies_ms=recorder.latencies_ms
    )


def _next_step(episode: Episode, action: str) -> dict[str, Any]:
    episode.seq += 1
    return {"session_id": episode.session_id, "action": action, "seq": episode.seq}


def _entries(status: int, body: bytes, wanted: int) -> list[dict[str, Any]]:
    """Return the entries of a batch's answer, each of which must have status `wanted`."""
    if status != 200:
        raise HubAnswer(status, body, request="batch")
    entries = json.loads(body)
    for entry in entries:
        if entry["status"] != wanted:
            raise HubAnswer(entry["status"], entry["detail"].encode(), request="batch entry")
    return entries


async def _measure_batch_opening(job: Job, routes: Routes) -> Measured:
    """Open `num_clients` episodes with one request, several times; closing is not counted."""
    latencies_ms: list[float] = []
    numbers = count()
    async with Client(job.target) as client:
        for _ in range(NUM_ROUNDS + 1):
            items = [ITEMS[job.env].format(next(numbers) % NUM_ITEMS) for _ in _each(job)]
            asked = [{"env": job.env, "item_id": item_id} for item_id in items]
            began_s = time.perf_counter()
            status, body = await client.ask("POST", "/v1/sessions/batch", asked)
            latencies_ms.append((time.perf_counter() - began_s) * 1e3)
            for entry in _entries(status, body, 201):
                await client.delete(entry["session_id"])
    counted = latencies_ms[1:]  # the first one warms up
    return Measured(
        num_done=len(counted) * job.num_clients,
        duration_s=sum(counted) / 1e3,
        latencies_ms=counted,
    )


def main() -> None:
    """Run the job given on stdin and write what it measured to stdout."""
    asked = json.load(sys.stdin)
    job = Job(**{**asked, "target": Target(**asked["target"])})
    json.dump(asdict(uvloop.run(run_job(job))), sys.stdout)


if __name__ == "__main__":
    main()
