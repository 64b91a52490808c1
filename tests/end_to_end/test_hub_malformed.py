"""Malformed requests do no harm: no 5xx, no lost worker, no changed session.

LONGSTRIDE_FUZZ_REQUESTS=20000 for the whole of it.
"""

from dataclasses import dataclass

import pytest

from benchmarks.envhub.hub import Client, ServiceTarget, hub_process
from tests.end_to_end.hubs import OUTSIDE, amount, offline_envs, run, worker_pids

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_REQUESTS = amount("LONGSTRIDE_FUZZ_REQUESTS", default=4000)
NUM_ROUNDS = 4  # victims that were deleted meanwhile are replaced after each
ITEMS = {
    "textcraft": "depth2-train-7",
    "babyai": "GoToLocal-train-7",
    "outside": "any-train-7",
    "sqlgym": "",
    "maze": "",
    "wordle": "",
    "searchqa": "",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bystander:
    """A session that is stepped once before the attack and finished after it."""

    env: str
    item_id: str
    session_id: str
    answer: dict


async def item_of(client: Client, env: str) -> str:
    """Return some item of an environment."""
    subsets = (await client.want(200, "GET", "/v1/envs"))[env]["subsets"]
    return ITEMS[env] or f"{sorted(subsets)[0]}-train-7"


async def open_bystanders(target: ServiceTarget, envs: list[str]) -> list[Bystander]:
    found = []
    async with Client(target) as client:
        for env in envs:
            item_id = await item_of(client, env)
            session_id, _ = await client.open(env, item_id)
            answer = await client.step(session_id, "no such action", 1)
            bystander = Bystander(env=env, item_id=item_id, session_id=session_id, answer=answer)
            found.append(bystander)
    return found


async def open_victims(target: ServiceTarget, envs: list[str]) -> list[str]:
    async with Client(target) as client:
        return [(await client.open(env, await item_of(client, env)))[0] for env in envs]


async def check_unharmed(target: ServiceTarget, bystanders: list[Bystander]) -> None:
    async with Client(target) as client:
        for bystander in bystanders:
            again = await client.step(bystander.session_id, "no such action", 1)
            assert again == bystander.answer, bystander
            if again["done"]:
                continue
            action = (await client.hint(bystander.session_id))["expert_action"]
            fresh, _ = await client.open(bystander.env, bystander.item_id)
            first = await client.step(fresh, "no such action", 1)
            assert first == again or bystander.env == "outside"
            attacked = await client.step(bystander.session_id, action, 2)
            assert attacked == await client.step(fresh, action, 2) or bystander.env == "outside"


def test_malformed_requests_harm_no_worker_or_session() -> None:
    from tests.end_to_end.malformed import Fuzz, fetch_document  # The import takes seconds.

    envs = ["outside", *(name for name in ITEMS if name in offline_envs())]
    served = [OUTSIDE if name == "outside" else name for name in envs]
    # A bystander does nothing meanwhile, however long that takes on a busy machine.
    with hub_process(served, overrides=["envhub.session_idle_s=7200"]) as hub:
        bystanders = run(open_bystanders(hub.target, envs))
        workers = worker_pids(hub)
        fuzz = Fuzz(hub.target, run(fetch_document(hub.target)))
        for _ in range(NUM_ROUNDS):
            victims = run(open_victims(hub.target, envs))
            fuzz.send_by_schema(NUM_REQUESTS // (2 * NUM_ROUNDS), victims=victims)
            victims = run(open_victims(hub.target, envs))
            run(fuzz.send_texts(NUM_REQUESTS // (8 * NUM_ROUNDS), victims=victims))
            run(fuzz.send_bytes(3 * NUM_REQUESTS // (8 * NUM_ROUNDS), victims=victims))
        assert fuzz.bad == []
        assert fuzz.num_sent >= NUM_REQUESTS * 0.95, fuzz.statuses
        assert fuzz.statuses[422] + fuzz.statuses[400] > NUM_REQUESTS // 4, fuzz.statuses
        assert hub.process.poll() is None
        assert workers <= worker_pids(hub)
        run(check_unharmed(hub.target, bystanders))
