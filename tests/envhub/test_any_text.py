"""Law of the policy's texts: any text is an action, in each environment and bridge."""

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from actor.rollout.env_client import HubClient
from common.config.env import RemoteOptions
from common.config.envhub import EnvhubSection
from envhub.agentgym.dialects import DIALECTS
from envhub.catalogue.registry import LOADERS, missing_requirements
from tests.envhub.any_text import TEXTS, TIMEOUT_S, check_texts, serving
from tests.marks import WITH_PROCESSES, long_for

SORT = f"{Path(__file__).parents[2]}/docs/examples/sort.py:make_spec"
AGENTGYM = ("babyai", "maze", "sqlgym", "textcraft", "wordle")  # Maze's server gives no reasons.
OPENENV = ("textcraft", "wordle", "recall")
MIB = 1 << 20

pytestmark = pytest.mark.timeout(600)


@pytest.mark.slow
@pytest.mark.parametrize("env", long_for(sorted(LOADERS), WITH_PROCESSES))
def test_any_text_is_an_action_of_each_environment(env: str) -> None:
    missing = missing_requirements([env])
    if missing:
        pytest.skip(missing[0])
    with serving(env) as url:
        asyncio.run(check_texts(url, env))


@pytest.mark.slow
@pytest.mark.parametrize(
    "reference",
    long_for([SORT, "gymnasium:FrozenLake-v1", "gymnasium:Taxi-v4"], ["gymnasium:Taxi-v4"]),
)
def test_any_text_is_an_action_of_an_outside_environment(reference: str) -> None:
    name = "sort" if reference == SORT else reference.partition(":")[2]
    with serving(reference) as url:
        asyncio.run(check_texts(url, name, has_reasons=reference != SORT))


@pytest.mark.slow
@pytest.mark.parametrize("env", long_for(OPENENV, ["wordle", "recall"]))
def test_any_text_is_an_action_over_openenv(env: str) -> None:
    with serving(env) as inner:
        remote = RemoteOptions(
            url=f"{inner}/openenv/{env}", dialect="openenv", action_field="message"
        )
        with serving(remote=remote) as url:
            asyncio.run(check_texts(url, "openenv"))


@pytest.mark.slow
@pytest.mark.parametrize("env", long_for(AGENTGYM, ["babyai", "sqlgym", "wordle"]))
def test_any_text_is_an_action_over_agentgym(env: str) -> None:
    with serving(env) as inner:
        remote = RemoteOptions(url=f"{inner}/agentgym/{env}", dialect=env)
        with serving(remote=remote) as url:
            asyncio.run(check_texts(url, env, has_reasons=env != "maze"))


@pytest.mark.slow
@pytest.mark.parametrize("env", long_for(AGENTGYM, ["babyai", "textcraft", "wordle"]))
def test_agentgyms_routes_answer_any_text(env: str) -> None:
    with serving(env) as url:
        asyncio.run(_answers_each(f"{url}/agentgym/{env}", env))


async def _answers_each(base: str, env: str) -> None:
    dialect, timeout = DIALECTS[env], aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as http:

        async def ask(verb: str, body: object) -> Any:
            sent = io.BytesIO(json.dumps(body).encode())  # The encoding of AgentGym's clients.
            headers = {"Content-Type": "application/json"}
            async with http.post(f"{base}/{verb}", data=sent, headers=headers) as answer:
                assert answer.status == 200, (verb, answer.status, await answer.text())
                return await answer.json()

        created = await ask("create", {})
        number = created if dialect.is_create_bare else created[dialect.instance_key]
        for name, text in TEXTS.items():
            await ask("reset", {dialect.instance_key: number, dialect.item_key: 0})
            told = await ask("step", {dialect.instance_key: number, "action": text})
            assert dialect.observation_key in told, (name, told)


def test_oversized_action_is_invalid_on_each_route() -> None:
    async def play(url: str) -> None:
        async with HubClient(url, token=None, timeout_s=TIMEOUT_S) as hub:
            for is_quick in (False, True):
                session = await hub.open(
                    "textcraft", "depth1-train-0", seed=0, style="compact", is_quick=is_quick
                )
                long = await session.step("\u5b57" * MIB)  # 3 MiB as it travels
                assert (long.is_valid, long.done, long.reward) == (False, False, 0.0)
                assert "3145728 bytes" in long.observation
                assert long.state == session.first_state != ""
                assert (await session.step("inventory")).is_valid
                short = await session.step("\u5b57" * (MIB // 3))
                assert "could not execute" in short.observation
                await session.close()

    with serving("textcraft", section=EnvhubSection(max_action_mib=1)) as url:
        asyncio.run(play(url))


def test_large_concurrent_actions_split_into_several_requests() -> None:
    async def play(url: str) -> None:
        async with HubClient(url, token=None, timeout_s=TIMEOUT_S) as hub:
            opening = (
                hub.open("textcraft", f"depth1-train-{n}", seed=0, style="compact", is_quick=True)
                for n in range(8)
            )
            sessions = await asyncio.gather(*opening)
            told = await asyncio.gather(*(each.step("\u5b57" * MIB) for each in sessions))
            assert {"could not execute" in each.observation for each in told} == {True}

    with serving("textcraft") as url:
        asyncio.run(play(url))


def test_lone_surrogate_is_an_action_of_each_route() -> None:
    async def play(url: str) -> None:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(url, timeout=timeout) as http:

            async def ask(path: str, body: object) -> Any:
                async with http.post(path, json=body) as answer:
                    assert answer.status in (200, 201), await answer.text()
                    return await answer.json()

            opened = {"env": "textcraft", "item_id": "depth1-train-0"}
            session = (await ask("/v1/sessions", opened))["session_id"]
            path, half = f"/v1/sessions/{session}/step", "get 1 \ud800"
            assert not (await ask(path, {"action": half, "seq": 1}))["is_valid"]
            entry = {"session_id": session, "action": half, "seq": 2}
            assert (await ask("/v1/step/batch", [entry]))[0]["status"] == 200
            async with http.ws_connect("/openenv/textcraft/ws") as socket:
                for frame in ({"type": "reset", "data": {}}, {"type": "step"}):
                    data = {"message": half} if frame["type"] == "step" else {}
                    await socket.send_str(json.dumps(frame | {"data": data}))
                    assert (await socket.receive_json())["type"] == "observation"

    with serving("textcraft") as url:
        asyncio.run(play(url))
