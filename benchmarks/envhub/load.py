"""Load on a hub or on the reference server, put on by a client process of its own.

That process is `python -m benchmarks.envhub.load` with a job on its stdin.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import count, cycle
from typing import Any

import uvloop

from benchmarks.envhub.client import Client, HubAnswer, Target
from common.repository import ROOT

JOB_TIMEOUT_S = 300.0
ITEMS = {"textcraft": "depth2-train-{}", "babyai": "GoToObjMazeS7-train-{}"}
NUM_ITEMS = 100  # distinct ones in turn
ACTIONS = {
    "textcraft": ("get 1 oak log", "inventory", "get 2 cobblestone", "craft 1 stick using 1 egg"),
    "babyai": ("turn left", "move forward", "turn right", "move forward"),
}
NUM_ROUNDS = 3  # of opening, after one that warms up


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One measurement of one client process.

    Its kind is step (single steps), open (creation and reset), batch or batch_open (the same by the
    batch routes, hub only). `open` counts whole rounds, whatever the seconds.
    """

    target: Target
    kind: str
    is_reference: bool  # the target speaks the reference server's routes
    env: str
    num_clients: int  # connections with one request under way each; `batch`: sessions of a call
    warmup_s: float = 0.4  # before counting begins
    duration_s: float = 1.5  # that counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a job counted: operations, over what time, and how long each request took."""

    num_done: int
    duration_s: float
    latencies_ms: list[float]
    cpu_s: float = 0.0  # that the server's process used meanwhile, where its process is known

    @property
    def per_s(self) -> float:
        return self.num_done / self.duration_s

    def percentile_ms(self, frac: float) -> float:
        """Return the latency that `frac` of the requests did not exceed."""
        ordered = sorted(self.latencies_ms)
        return ordered[min(len(ordered) - 1, int(frac * len(ordered)))]


def measure(job: Job) -> Measured:
    """Return what a client process of its own measured.

    Raises: RuntimeError: it failed; holds its last words.
    """
    return Measured(**in_process("benchmarks.envhub.load", asdict(job)))


def in_process(module: str, told: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON that a module wrote which was told some JSON. Raises: RuntimeError."""
    done = subprocess.run(
        [sys.executable, "-m", module],
        cwd=ROOT,
        input=json.dumps(told).encode(),
        capture_output=True,
        timeout=JOB_TIMEOUT_S,
    )
    if done.returncode != 0:
        raise RuntimeError(f"client failed: {done.stderr.decode(errors='replace')[-1500:]}")
    return json.loads(done.stdout)


@dataclass(slots=True, kw_only=True)
class Episode:
    session_id: str
    seq: int = 0  # steps so far


class HubRoutes:
    def __init__(self, env: str) -> None:
        self._env = env

    async def open(self, client: Client, number: int) -> Episode:
        """Create and reset: one request."""
        session_id, _ = await client.open(self._env, _item(self._env, number))
        return Episode(session_id=session_id)

    async def step(self, client: Client, episode: Episode, action: str) -> dict[str, Any]:
        episode.seq += 1
        return await client.step(episode.session_id, action, episode.seq)

    async def close(self, client: Client, episode: Episode) -> None:
        await client.delete(episode.session_id)


class ReferenceRoutes:
    def __init__(self, env: str) -> None:
        self._env = env

    async def _want(self, client: Client, verb: str, content: object = None) -> Any:
        answer = await client.want(200, "POST", f"/{self._env}/{verb}", content)
        if isinstance(answer, dict) and answer.get("error"):
            raise RuntimeError(answer["error"])
        return answer

    async def open(self, client: Client, number: int) -> Episode:
        """Create and reset: two requests."""
        made = await self._want(client, "create")
        begun = {"id": made["id"], "item_id": _item(self._env, number)}
        await self._want(client, "reset", begun)
        return Episode(session_id=str(made["id"]))

    async def step(self, client: Client, episode: Episode, action: str) -> dict[str, Any]:
        return await self._want(client, "step", {"action": action, "id": int(episode.session_id)})

    async def close(self, client: Client, episode: Episode) -> None:
        await self._want(client, "close", {"id": int(episode.session_id)})


Routes = HubRoutes | ReferenceRoutes


def _item(env: str, number: int) -> str:
    return ITEMS[env].format(number % NUM_ITEMS)


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
    routes = ReferenceRoutes(job.env) if job.is_reference else HubRoutes(job.env)
    kinds = {"step": _measure_steps, "batch": _measure_batches}
    return await kinds.get(job.kind, _measure_opening)(job, routes)


@asynccontextmanager
async def _clients(job: Job) -> AsyncIterator[list[Client]]:
    """Yield the connections of a job: one for batches, else one for each client."""
    async with AsyncExitStack() as stack:
        num = 1 if job.kind.startswith("batch") else job.num_clients
        yield [await stack.enter_async_context(Client(job.target)) for _ in range(num)]


async def _measure_steps(job: Job, routes: Routes) -> Measured:
    numbers = count()

    async def keep_stepping(client: Client, episode: Episode) -> None:
        for action in cycle(ACTIONS[job.env]):
            sent_s = time.perf_counter()
            answer = await routes.step(client, episode, action)
            goes_on = recorder.add(sent_s)
            if answer["done"] or not goes_on:
                await routes.close(client, episode)
            if not goes_on:
                return
            if answer["done"]:
                episode = await routes.open(client, next(numbers))

    async with _clients(job) as clients:
        episodes = [await routes.open(client, next(numbers)) for client in clients]
        recorder = Recorder(job)
        await asyncio.gather(*map(keep_stepping, clients, episodes))
    return recorder.measured(num_steps=1)


async def _measure_batches(job: Job, routes: Routes) -> Measured:
    """Step `num_clients` sessions of one connection with one request each time."""
    numbers = count()
    async with _clients(job) as (client,):
        episodes = [await routes.open(client, next(numbers)) for _ in range(job.num_clients)]
        recorder = Recorder(job)
        for action in cycle(ACTIONS[job.env]):
            steps = [
                {"session_id": each.session_id, "action": action, "seq": each.seq + 1}
                for each in episodes
            ]
            sent_s = time.perf_counter()
            results = await _want_batch(client, "/v1/step/batch", steps, 200)
            goes_on = recorder.add(sent_s)
            for i, result in enumerate(results):
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

    async def open_some(client: Client) -> tuple[list[Episode], float]:
        """Return the episodes of one request, and the milliseconds that it took."""
        began_s = time.perf_counter()
        if job.kind == "batch_open":
            episodes = await _open_batch(job, client, numbers)
        else:
            episodes = [await routes.open(client, next(numbers))]
        return episodes, (time.perf_counter() - began_s) * 1e3

    async with _clients(job) as clients:
        for round_number in range(NUM_ROUNDS + 1):
            began_s = time.perf_counter()
            opened = await asyncio.gather(*map(open_some, clients))
            if round_number > 0:  # the first one warms up
                took_s += time.perf_counter() - began_s
                latencies_ms += [took_ms for _, took_ms in opened]
            for episodes, _ in opened:
                for episode in episodes:
                    await routes.close(clients[0], episode)
    num_done = NUM_ROUNDS * job.num_clients
    return Measured(num_done=num_done, duration_s=took_s, latencies_ms=latencies_ms)


async def _open_batch(job: Job, client: Client, numbers: Iterator[int]) -> list[Episode]:
    items = [_item(job.env, next(numbers)) for _ in range(job.num_clients)]
    asked = [{"env": job.env, "item_id": item_id} for item_id in items]
    entries = await _want_batch(client, "/v1/sessions/batch", asked, 201)
    return [Episode(session_id=each["session_id"]) for each in entries]


async def _want_batch(
    client: Client, path: str, content: list[Any], wanted: int
) -> list[dict[str, Any]]:
    """Return the entries of a batch's answer, each of which must have status `wanted`."""
    entries = await client.want(200, "POST", path, content)
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
