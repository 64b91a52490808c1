"""Checks that every item is solvable: clients play the actions of /hint to the end, over HTTP."""

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import uvloop

from benchmarks.envhub.hub import Client, HubAnswer, ServiceProcess, ServiceTarget

MIN_SOLVED_FRAC = 0.99
NUM_CLIENTS = 8
OPEN_TIMEOUT_S = 120.0
RETRY_S = 0.2
MAX_RETRIED = 10
NO_WAY = "the expert knows no way"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subset:
    """One subset as GET /v1/envs lists it."""

    env: str
    name: str
    num_train: int
    num_test: int
    max_turns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedItem:
    """The result of one item; `fault` is empty when the expert solved it.

    `is_outage`: the hub failed. Another session in the same worker may be the cause.
    """

    item_id: str
    num_turns: int
    fault: str = ""
    is_outage: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SubsetResult:
    """All outcomes of one subset, their time, and the number of repeated items."""

    subset: Subset
    outcomes: list[SolvedItem]
    took_s: float
    num_retried: int

    @property
    def faults(self) -> list[SolvedItem]:
        return [each for each in self.outcomes if each.fault]

    @property
    def solved_frac(self) -> float:
        return 1 - len(self.faults) / len(self.outcomes)

    @property
    def has_expert(self) -> bool:
        """Whether the expert had a first action for any item."""
        return any(each.fault != NO_WAY or each.num_turns > 0 for each in self.outcomes)


async def list_subsets(target: ServiceTarget) -> list[Subset]:
    async with Client(target) as client:
        catalogue = await client.want(200, "GET", "/v1/envs")
    return [
        Subset(env=env, name=name, **sizes)
        for env, entry in catalogue.items()
        for name, sizes in entry["subsets"].items()
    ]


def sample_items(subset: Subset, num_items: int) -> list[str]:
    """Return ids of distinct items, the same on every machine; half of them test items."""
    chance = random.Random(f"{subset.env} {subset.name}")
    num_test = min(subset.num_test, max((num_items + 1) // 2, num_items - subset.num_train))
    num_train = min(subset.num_train, num_items - num_test)
    test = chance.sample(range(subset.num_test), num_test)
    train = chance.sample(range(subset.num_train), num_train)
    ids = [f"{subset.name}-test-{index}" for index in sorted(test)]
    return ids + [f"{subset.name}-train-{index}" for index in sorted(train)]


async def solve_subset(target: ServiceTarget, subset: Subset, *, num_items: int) -> SubsetResult:
    """Follow the expert through a sample of a subset, NUM_CLIENTS episodes at a time.

    Items that an outage ended run once more, alone. Then only items that cause an outage count.
    """
    left = iter(sample_items(subset, num_items))
    outcomes: list[SolvedItem] = []

    async def work() -> None:
        async with Client(target) as client:
            for item_id in left:
                outcomes.append(await solve_item(client, subset, item_id))

    began_s = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(NUM_CLIENTS)))
    took_s = time.perf_counter() - began_s
    retried = [each for each in outcomes if each.is_outage][:MAX_RETRIED]
    async with Client(target) as client:
        for each in retried:
            outcomes.remove(each)
            outcomes.append(await solve_item(client, subset, each.item_id))
    return SubsetResult(subset=subset, outcomes=outcomes, took_s=took_s, num_retried=len(retried))


async def solve_item(client: Client, subset: Subset, item_id: str) -> SolvedItem:
    """Follow the expert from reset to the end of one item, at most `max_turns` turns."""
    num_turns = 0
    fault = f"no end in {subset.max_turns} turns"
    try:
        session_id = await open_patiently(client, subset.env, item_id)
        while num_turns < subset.max_turns:
            action = (await client.hint(session_id))["expert_action"]
            if action is None:
                fault = NO_WAY
                break
            num_turns += 1
            answer = await client.step(session_id, action, num_turns)
            if answer["done"]:
                fault = "" if answer["is_success"] else f"ended with {answer['reward']}"
                break
    except (HubAnswer, OSError) as error:
        fault = str(error) or repr(error)
        return SolvedItem(item_id=item_id, num_turns=num_turns, fault=fault, is_outage=True)
    await client.delete(session_id)
    return SolvedItem(item_id=item_id, num_turns=num_turns, fault=fault)


async def open_patiently(client: Client, env: str, item_id: str) -> str:
    """Return a new session's id; wait while all sessions of the environment are in use."""
    deadline_s = time.monotonic() + OPEN_TIMEOUT_S
    while True:
        try:
            return (await client.open(env, item_id))[0]
        except HubAnswer as error:
            if error.status != 429 or time.monotonic() > deadline_s:
                raise
        await asyncio.sleep(RETRY_S)


def solve_all(
    hub: ServiceProcess, subsets: list[Subset], *, num_items: int
) -> Iterator[SubsetResult]:
    """Yield a tally for each of these subsets of a running hub."""
    for subset in subsets:
        yield uvloop.run(solve_subset(hub.target, subset, num_items=num_items))
