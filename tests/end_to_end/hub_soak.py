"""The memory growth of a hub: mixed load for minutes, and sessions that are never closed."""

import asyncio
import itertools
import random
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field

import uvloop

from benchmarks.envhub.hub import Client, HubAnswer, ServiceProcess, ServiceTarget, hub_process
from tests.end_to_end.hub_solve import Subset, list_subsets, open_patiently

ENVS = ("textcraft", "babyai", "maze", "wordle", "sqlgym")
NUM_CLIENTS = 16
IDLE_S = 5.0
MAX_GROWTH_FRAC = 0.10
SETTLE_S = 15.0  # Time to release memory after the last session has expired.
NUM_SAMPLES = 60
GARBAGE = ("", "fly", "get -1 oak log", "Action:", "\u2603" * 50, "x" * 3000, "a\n\0b", '{"a":1}')


@dataclass(slots=True, kw_only=True)
class Soak:
    """The result of a mixed load: answers by kind, and resident memory over time."""

    hub_bytes: list[int] = field(default_factory=list[int])
    worker_bytes: list[int] = field(default_factory=list[int])
    counts: Counter[str] = field(default_factory=Counter[str])
    failures: list[str] = field(default_factory=list[str])

    def growth_frac(self) -> float:
        """Return the relative growth of hub and worker memory from the middle to the last third."""
        both = [a + b for a, b in zip(self.hub_bytes, self.worker_bytes, strict=True)]
        third = len(both) // 3
        return statistics.median(both[-third:]) / statistics.median(both[-2 * third : -third]) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandoned:
    """Resident memory before, with, and after sessions that were never closed."""

    num_sessions: int
    start_bytes: int
    peak_bytes: int
    end_bytes: int
    took_s: float

    @property
    def growth_frac(self) -> float:
        return self.end_bytes / self.start_bytes - 1


def soak_hub(hub: ServiceProcess, *, duration_s: float) -> Soak:
    """Put a mixed load on a running hub and return its result."""
    return uvloop.run(_soak(hub, duration_s))


async def _soak(hub: ServiceProcess, duration_s: float) -> Soak:
    soak = Soak()
    subsets = await list_subsets(hub.target)
    end_s = time.monotonic() + duration_s
    clients = [
        asyncio.create_task(_keep_playing(hub.target, subsets, soak, number, end_s))
        for number in range(NUM_CLIENTS)
    ]
    while time.monotonic() < end_s:
        await asyncio.sleep(duration_s / NUM_SAMPLES)
        soak.hub_bytes.append(hub.rss_bytes())
        soak.worker_bytes.append(hub.worker_rss_bytes())
    await asyncio.gather(*clients)
    return soak


async def _keep_playing(
    target: ServiceTarget, subsets: list[Subset], soak: Soak, number: int, end_s: float
) -> None:
    chance = random.Random(number)
    async with Client(target) as client:
        while time.monotonic() < end_s:
            subset = chance.choice(subsets)
            try:
                await _play(client, subset, chance, soak, end_s)
            except (HubAnswer, OSError) as error:
                soak.failures.append(f"{subset.env} {subset.name}: {error!r}")


async def _play(
    client: Client, subset: Subset, chance: random.Random, soak: Soak, end_s: float
) -> None:
    """Play one episode with valid and invalid actions and repeated steps; close or abandon it."""
    item_id = f"{subset.name}-train-{chance.randrange(subset.num_train)}"
    session_id = await open_patiently(client, subset.env, item_id)
    soak.counts["opened"] += 1
    for seq in range(1, subset.max_turns + 1):
        if time.monotonic() > end_s:
            break
        kind = chance.random()
        action = chance.choice(GARBAGE)
        if kind < 0.7:
            hint = await client.hint(session_id)
            soak.counts["hints"] += 1
            action = chance.choice(hint["valid_actions"] or [action])
        answer = await client.step(session_id, action, seq)
        soak.counts["steps"] += 1
        if kind < 0.1 and await client.step(session_id, action, seq) != answer:
            raise AssertionError(f"{item_id}: a repeated step {seq} was answered differently")
        if kind > 0.95:
            await client.want(200, "GET", f"/v1/sessions/{session_id}/render")
        if answer["done"] or chance.random() < 0.05:
            break
    if chance.random() < 0.3:
        soak.counts["abandoned"] += 1
        return
    await client.delete(session_id)


def abandon(*, num_sessions: int, idle_s: float) -> Abandoned:
    """Open sessions that are never closed, wait for their idle limit, return the hub's memory.

    The initial memory is measured after 50 sessions of each environment, so that caches are filled.
    """
    overrides = [f"envhub.session_idle_s={idle_s:g}", f"envhub.capacity={num_sessions}"]
    with hub_process(ENVS[:2], overrides=overrides) as hub:
        return uvloop.run(_abandon(hub, num_sessions, idle_s))


async def _abandon(hub: ServiceProcess, num_sessions: int, idle_s: float) -> Abandoned:
    began_s = time.monotonic()
    async with Client(hub.target) as client:
        subsets = await list_subsets(hub.target)
        # The largest subset of every environment.
        by_size = sorted(subsets, key=lambda each: each.num_train)
        turn = itertools.cycle({each.env: each for each in by_size}.values())
        for number in range(50 * len(subsets)):
            subset = next(turn)
            await client.delete((await client.open(subset.env, f"{subset.name}-train-{number}"))[0])
        start_bytes = hub.rss_bytes()
        for number in range(num_sessions):
            subset = next(turn)
            await client.open(subset.env, f"{subset.name}-train-{number % subset.num_train}")
        peak_bytes = hub.rss_bytes()
        async with asyncio.timeout(3 * idle_s + 10):
            while (await client.want(200, "GET", "/healthz"))["num_sessions"]:
                await asyncio.sleep(0.2)
        end_bytes = await _settled_bytes(hub, (1 + MAX_GROWTH_FRAC) * start_bytes)
    return Abandoned(
        num_sessions=num_sessions,
        start_bytes=start_bytes,
        peak_bytes=peak_bytes,
        end_bytes=end_bytes,
        took_s=time.monotonic() - began_s,
    )


async def _settled_bytes(hub: ServiceProcess, enough_bytes: float) -> int:
    """Return the resident memory once it is small enough, or after SETTLE_S."""
    deadline_s = time.monotonic() + SETTLE_S
    while hub.rss_bytes() > enough_bytes and time.monotonic() < deadline_s:
        await asyncio.sleep(0.5)
    return hub.rss_bytes()
