"""Load on a hub or on the reference server; a job on the stdin of `python -m envhub.bench.load`."""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

import uvloop

from envhub.bench.client import Client, HubAnswer, Target
from envhub.bench.job import Job, Measured

ITEMS = {"textcraft": "depth2-train-{}", "babyai": "GoToObjMazeS7-train-{}"}
NUM_ITEMS = 100  # distinct ones in turn
ACTIONS = {
    "textcraft": ("get 1 oak log", "inventory", "get 2 cobblestone", "craft 1 stick using 1 egg"),
    "babyai": ("turn left", "move forward", "turn right", "move forward"),
}
DONE = (b'"done": true', b'"done":true')
FAILED = (b'"error":"', b'"error": "')
NUM_ROUNDS = 3  # of opening, after one that warms up


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
        session_id, _ = await client.open(self._job.env, _item(self._job, number))
        path = f"/v1/sessions/{session_id}/step"
        return Episode(session_id=session_id, head=self._job.target.head("POST", path))

    def step_body(self, episode: Episode, action: str) -> bytes:
        """Return the body of the next step."""
        episode.seq += 1
        return b'{"action":"%s","seq":%d}' % (action.encode(), episode.seq)

    async def close(self, client: Client, episode: Episode) -> None:
        await client.delete(episode.session_id)


class ReferenceRoutes:
    """The routes of `envhub.bench.reference`."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._head = job.target.head("POST", f"/{job.env}/step")

    async def open(self, client: Client, number: int) -> Episode:
        """Create and reset: two requests."""
        made = await client.want(200, "POST", f"/{self._job.env}/create")
        begun = {"id": made["id"], "item_id": _item(self._job, number)}
        answer = await client.want(200, "POST", f"/{self._job.env}/reset", begun)
        if answer["error"]:
            raise RuntimeError(answer["error"])
        return Episode(session_id=str(made["id"]), head=self._head)

    def step_body(self, episode: Episode, action: str) -> bytes:
        return b'{"action":"%s","id":%s}' % (action.encode(), episode.session_id.encode())

    async def close(self, client: Client, episode: Episode) -> None:
        path = f"/{self._job.env}/close"
        await client.want(200, "POST", path, {"id": int(episode.session_id)})


Routes = HubRoutes | ReferenceRoutes


def _item(job: Job, number: int) -> str:
    return ITEMS[job.env].format(number % NUM_ITEMS)


class Recorder:
    """Latencies of the requests that end within the counted time."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._begin_s = time.perf_counter() + job.warmup_s
        self._end_s = self._begin_s + job.duration_s
        self._latencies_ms: list[float] = []

    def add(self, sent_s: float) -> bool:
        """Count a request that is answered now; return whether to go on."""
        answered_s = time.perf_counter()
        if self._begin_s <= answered_s < self._end_s:
            self._latencies_ms.append((answered_s - sent_s) * 1e3)
        return answered_s < self._end_s

    def measured(self, *, num_steps: int) -> Measured:
        """Return what was counted, with `num_steps` steps in a request."""
        num_done = num_steps * len(self._latencies_ms)
        return Measured(
            num_done=num_done, duration_s=self._job.duration_s, latencies_ms=self._latencies_ms
        )


async def run_job(job: Job) -> Measured:
    """Return what this process measures."""
    routes = ReferenceRoutes(job) if job.is_reference else HubRoutes(job)
    kinds = {
        "step": _measure_steps,
        "open": _measure_opening,
        "batch": _measure_batches,
        "batch_open": _measure_opening,
    }
    return await kinds[job.kind](job, routes)


@asynccontextmanager
async def _clients(job: Job) -> AsyncIterator[list[Client]]:
    """Yield the connections of a job: one for batches, else one for each client."""
    async with AsyncExitStack() as stack:
        num = 1 if job.kind.startswith("batch") else job.num_clients
        yield [await stack.enter_async_context(Client(job.target)) for _ in range(num)]


async def _measure_steps(job: Job, routes: Routes) -> Measured:
    numbers = count()
    async with _clients(job) as clients:
        episodes = [await routes.open(client, next(numbers)) for client in clients]
        recorder = Recorder(job)
        pairs = zip(clients, episodes, strict=True)
        loops = [_keep_stepping(job, routes, recorder, *pair, numbers) for pair in pairs]
        for client, episode in zip(clients, await asyncio.gather(*loops), strict=True):
            await routes.close(client, episode)
    return recorder.measured(num_steps=1)


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
        goes_on = recorder.add(sent_s)
        if status != 200 or any(mark in answer for mark in FAILED):
            raise HubAnswer(status, answer, request="step")
        if not goes_on:
            return episode
        if any(mark in answer for mark in DONE):
            await routes.close(client, episode)
            episode = await routes.open(client, next(numbers))
    raise AssertionError("unreachable: turns have no end")


async def _measure_batches(job: Job, routes: Routes) -> Measured:
    """Step `num_clients` sessions of one connection with one request each time."""
    numbers = count()
    actions = ACTIONS[job.env]
    async with _clients(job) as (client,):
        episodes = [await routes.open(client, next(numbers)) for _ in range(job.num_clients)]
        recorder = Recorder(job)
        goes_on = True
        for turn in count():
            action = actions[turn % len(actions)]
            steps = [
                {"session_id": each.session_id, "action": action, "seq": each.seq + 1}
                for each in episodes
            ]
            sent_s = time.perf_counter()
            status, body = await client.ask("POST", "/v1/step/batch", steps)
            goes_on = recorder.add(sent_s)
            for i, result in enumerate(_entries(status, body, 200)):
                episodes[i].seq += 1
                if result["done"]:
                    episodes[i] = await routes.open(client, next(numbers))
            if not goes_on:
                break
        for episode in episodes:
            await routes.close(client, episode)
    return recorder.measured(num_steps=job.num_clients)


async def _measure_opening(job: Job, routes: Routes) -> Measured:
    """Open `num_clients` episodes at once, several times; closing them is not counted."""
    numbers = count()
    latencies_ms: list[float] = []
    took_s = 0.0
    async with _clients(job) as clients:
        for round_number in range(NUM_ROUNDS + 1):
            began_s = time.perf_counter()
            if job.kind == "batch_open":
                opening = [_open_batch(job, clients[0], numbers)]
            else:
                opening = [_open_one(routes, client, next(numbers)) for client in clients]
            opened = await asyncio.gather(*opening)
            if round_number > 0:  # the first one warms up
                took_s += time.perf_counter() - began_s
                latencies_ms += [took_ms for _, took_ms in opened]
            for episodes, _ in opened:
                for episode in episodes:
                    await routes.close(clients[0], episode)
    num_done = NUM_ROUNDS * job.num_clients
    return Measured(num_done=num_done, duration_s=took_s, latencies_ms=latencies_ms)


async def _open_one(routes: Routes, client: Client, number: int) -> tuple[list[Episode], float]:
    """Return an episode, and the milliseconds that it took to open."""
    began_s = time.perf_counter()
    episode = await routes.open(client, number)
    return [episode], (time.perf_counter() - began_s) * 1e3


async def _open_batch(
    job: Job, client: Client, numbers: Iterator[int]
) -> tuple[list[Episode], float]:
    """Return the episodes of one request, and the milliseconds that it took."""
    items = [_item(job, next(numbers)) for _ in range(job.num_clients)]
    asked = [{"env": job.env, "item_id": item_id} for item_id in items]
    began_s = time.perf_counter()
    status, body = await client.ask("POST", "/v1/sessions/batch", asked)
    took_ms = (time.perf_counter() - began_s) * 1e3
    entries = _entries(status, body, 201)
    return [Episode(session_id=each["session_id"], head=b"") for each in entries], took_ms


def _entries(status: int, body: bytes, wanted: int) -> list[dict[str, Any]]:
    """Return the entries of a batch's answer, each of which must have status `wanted`."""
    if status != 200:
        raise HubAnswer(status, body, request="batch")
    entries = json.loads(body)
    for entry in entries:
        if entry["status"] != wanted:
            raise HubAnswer(entry["status"], entry["detail"].encode(), request="batch entry")
    return entries


def main() -> None:
    """Run the job given on stdin and write what it measured to stdout."""
    asked = json.load(sys.stdin)
    job = Job(**{**asked, "target": Target(**asked["target"])})
    json.dump(asdict(uvloop.run(run_job(job))), sys.stdout)


if __name__ == "__main__":
    main()
