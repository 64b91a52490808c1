"""Laws of driving AgentGym servers: our own routes, and stubs in the shapes of the others."""

import asyncio
import math
import socket
from typing import Any

import httpx
import pytest

from common.config.env import RemoteOptions
from common.errors import ConfigError
from envhub.agentgym.dialects import DIALECTS
from envhub.agentgym.remote import check
from envhub.env import EnvFailure, EnvSpec, StepResult, Style, UnknownItem
from tests.envhub.agentgym.agentgym_clients import (
    DIRECT,
    native_item,
    native_name,
    phrase,
    serve_app,
    serve_envs,
)
from tests.envhub.agentgym.agentgym_stubs import TOOLS, Stub
from tests.envhub.agentgym.driving import drive, made, spec_of, stop
from tests.marks import WITH_PROCESSES, long_for

QUICK = ("textcraft", "babyai", "maze", "wordle")
SUCCESS_INDEX = {"textcraft": 3, "babyai": 83, "maze": 4, "wordle": 11, "sciworld": 2936}


@pytest.fixture(scope="module")
def hub():
    with serve_envs(*QUICK) as url:
        yield url


async def driven(
    dialect: str, url: str, *steps: str, item: str = "all-train-7", **changes: Any
) -> tuple[str, list[StepResult]]:
    """Return the first observation and the results of the steps."""
    spec = spec_of(dialect, url, **changes)
    env = made(spec)
    try:
        first = await env.reset(item, 0)
        return first, [await env.step(each) for each in steps]
    finally:
        await env.close()
        await stop(spec)


def play_round_trip(name: str, hub: str) -> None:
    """Play an item over our own AgentGym routes and natively, side by side, to success."""
    index = SUCCESS_INDEX.get(name, 0)
    item_id = native_item(name, index)
    spec = spec_of(name, f"{hub}/agentgym/{native_name(name)}", num_train=10**6, num_test=0)
    num_train = spec.subsets["all"].num_train
    assert index < num_train

    async def play(native: httpx.Client) -> None:
        body = {"env": native_name(name), "item_id": item_id, "style": "agentgym"}
        opened = native.post("/v1/sessions", json=body).json()
        path = f"/v1/sessions/{opened['session_id']}"
        env = made(spec)
        first = await env.reset(f"all-train-{index}", 0)
        assert first == opened["observation"]
        is_done, seq = False, 0
        while not is_done:
            seq += 1
            text = phrase(name, native.get(f"{path}/hint").json()["expert_action"])
            twin = native.post(f"{path}/step", json={"action": text, "seq": seq}).json()
            result = await env.step(text)
            is_done = result.done
            assert (result.observation, result.reward) == (twin["observation"], twin["reward"])
            assert (result.done, result.is_valid) == (twin["done"], twin["is_valid"])
        assert result.reward == 1
        await env.close()
        await stop(spec)

    with httpx.Client(base_url=hub, **DIRECT) as native:
        asyncio.run(play(native))


@pytest.mark.parametrize("name", QUICK)
def test_remote_plays_our_own_routes_to_success(hub, name):
    play_round_trip(name, hub)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", long_for(["sqlgym", "searchqa", "sciworld", "webarena"], WITH_PROCESSES)
)
def test_remote_plays_our_routes_to_success_in_a_worker(name):
    with serve_envs(name) as hub:
        play_round_trip(name, hub)


def test_remote_server_works_as_an_environment_of_a_hub(hub):
    remote = RemoteOptions(dialect="maze", url=f"{hub}/agentgym/maze", num_train=20, num_test=5)
    with serve_envs(remote=remote) as outer, httpx.Client(base_url=outer, **DIRECT) as client:
        catalogue = client.get("/v1/envs").json()["maze"]
        assert catalogue["subsets"]["all"] == {"num_train": 20, "num_test": 5, "max_turns": 30}
        opened = client.post("/v1/sessions", json={"env": "maze", "item_id": "all-test-0"}).json()
        assert "current position is at position 1, 3" in opened["observation"]  # game 2
        path = f"/v1/sessions/{opened['session_id']}"
        stepped = client.post(f"{path}/step", json={"action": "jump", "seq": 1}).json()
        assert (stepped["is_valid"], stepped["done"]) == (False, False)
        assert len(client.get(f"{path}/hint").json()["valid_actions"]) == 4
        assert client.post("/agentgym/maze/create").status_code == 404


def test_lost_maze_pays_zero_instead_of_a_penalty(hub):
    _, results = asyncio.run(
        driven("maze", f"{hub}/agentgym/maze", *["Action: jump"] * 51, item="all-train-4")
    )
    assert (results[-1].reward, results[-1].done) == (0.0, True)


def test_several_actions_are_refused_without_request(hub):
    text = "Action: turn left\nAction: turn right"
    _, (result,) = asyncio.run(driven("babyai", f"{hub}/agentgym/babyai", text))
    assert not result.is_valid
    assert result.observation.startswith("Error: Only one 'Action' is allowed")


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        ("You cannot see any objects within sight.The room has walls around you. ", True),
        ("You cannot go to red ball 1, as there is no path leading to it.", False),
        ("You cannot pickup red ball 1, as there is no path leading to it.", False),
    ],
)
def test_babyai_seeing_nothing_is_no_refusal(text, is_valid):
    stub = Stub("babyai")
    stub.observation = text
    with serve_app(stub.app) as url:
        _, (result,) = asyncio.run(driven("babyai", url, "Action: turn left"))
    assert result.is_valid is is_valid


@pytest.mark.parametrize("score", [math.inf, math.nan])
def test_score_that_is_not_finite_is_no_reward(score):
    stub = Stub("babyai")
    stub.observation, stub.score = "done", score
    with serve_app(stub.app) as url, pytest.raises(EnvFailure, match="is not a finite number"):
        asyncio.run(driven("babyai", url, "Action: turn left"))


@pytest.mark.parametrize(("dialect", "is_success"), [("babyai", True), ("sciworld", False)])
def test_each_dialect_defines_its_own_success(dialect: str, is_success: bool):
    spec = spec_of(dialect, "http://127.0.0.1:9")
    env = made(spec)
    lost = {"observation": "on", "reward": 0, "score": 0, "done": True}
    late = lost | {"score": 0.6 * DIALECTS[dialect].max_score}
    won = lost | {"score": DIALECTS[dialect].max_score}
    assert [env._read(each, "a").is_success for each in (lost, late, won)] == [
        *(False, is_success, True)
    ]
    assert not env._read(late | {"done": False}, "a").is_success


def test_alfworld_first_observation_lists_the_actions():
    stub = Stub("alfworld")
    with serve_app(stub.app) as url:
        first, results = asyncio.run(driven("alfworld", url, "Action: jump", "Action:\ngood"))
    assert first.endswith("Your task is to: sleep.\nAVAILABLE ACTIONS: go to bed 1,look")
    assert stub.resets == [{"game": 7, "world_type": "Text", "id": 0}]
    assert [each["action"] for each in stub.steps] == ["jump", "good"]
    assert [(each.reward, each.done, each.is_valid) for each in results] == [
        (0.0, False, False),
        (1.0, True, True),
    ]


def test_webshop_first_observation_is_requested_from_the_server():
    stub = Stub("webshop")
    with serve_app(stub.app) as url:
        first, results = asyncio.run(driven("webshop", url, "I buy.\nAction: click[good]"))
    assert first == "question 7"
    assert stub.resets == [{"session_id": 7, "env_idx": 0}]
    assert stub.steps == [{"action": "click[good]", "env_idx": 0}]
    assert (results[0].reward, results[0].done) == (1.0, True)


@pytest.mark.parametrize("name", TOOLS)
def test_tool_servers_get_the_whole_text(name):
    stub = Stub(name)
    good = "Thought: well\n\nAction: finish with Action Input: {'answer': 'good'}"
    with serve_app(stub.app) as url:
        first, results = asyncio.run(driven(name, url, "gibberish", good))
    assert first == "question 7"
    assert stub.resets == [{"id": 7, "env_idx": 0}]
    assert [each["action"] for each in stub.steps] == ["gibberish", good]
    assert [(each.reward, each.done, each.is_valid) for each in results] == [
        (0.25, False, False),
        (1.0, True, True),
    ]


def test_webarena_pays_only_at_the_end():
    stub = Stub("webarena")
    texts = ("so ```click [1]```", "so ```fly [1]```", "so ```stop [x]```")
    with serve_app(stub.app) as url:
        first, results = asyncio.run(driven("webarena", url, "no fence", *texts))
    assert first.startswith("OBSERVATION:\n")
    assert stub.resets == [{"idx": 7, "seed": 0, "env_idx": 0}]
    assert [each["action"] for each in stub.steps] == list(texts)
    assert [(each.reward, each.done, each.is_valid) for each in results] == [
        (0.0, False, False),
        (0.0, False, True),
        (0.0, False, False),
        (1.0, True, True),
    ]
    assert (stub.num_created, stub.num_closed) == (1, 1)


def test_webarena_failures_under_status_200_are_infrastructure_errors():
    stub = Stub("webarena")
    with serve_app(stub.app) as url:
        with pytest.raises(EnvFailure, match="cannot reset item 13"):
            asyncio.run(driven("webarena", url, item="all-train-13"))
        stub.fault = "text"
        with pytest.raises(EnvFailure, match="Target closed"):
            asyncio.run(driven("webarena", url, "so ```click [1]```"))


@pytest.mark.parametrize("fault", ["status", "error", "text"])
def test_failing_step_raises_an_error_that_names_the_server(fault):
    stub = Stub("alfworld")
    stub.fault = fault
    with serve_app(stub.app) as url, pytest.raises(EnvFailure) as failure:
        asyncio.run(driven("alfworld", url, "Action: good"))
    assert f"AgentGym server alfworld at {url}: POST step" in str(failure.value)
    assert len(stub.steps) == 1  # it may have run, so it is not sent again


def test_silent_server_is_an_infrastructure_error():
    async def play(url: str) -> str:
        with pytest.raises(EnvFailure) as failure:
            await driven("textcraft", url, timeout_s=0.1)
        return str(failure.value)

    async def silence() -> str:
        is_gone = asyncio.Event()

        async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()
            await writer.wait_closed()
            is_gone.set()

        server = await asyncio.start_server(swallow, "127.0.0.1", 0)
        async with server:
            told = await play(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            await is_gone.wait()
            return told

    assert "0.1 s" in asyncio.run(silence())


def test_absent_server_is_an_infrastructure_error():
    with pytest.raises(EnvFailure, match=r"sqlgym at http://127\.0\.0\.1:9: POST"):
        asyncio.run(driven("sqlgym", "http://user:secret@127.0.0.1:9"))


def test_instances_without_close_are_reused():
    stub = Stub("weather")

    async def play(spec: EnvSpec) -> None:
        for index in range(3):
            env = made(spec)
            assert await env.reset(f"all-train-{index}", 0) == f"question {index}"
            await env.close()

    drive(stub.app, "weather", play)
    assert stub.num_created == 1


def test_forgotten_instance_is_replaced():
    stub = Stub("alfworld")

    async def play(spec: EnvSpec) -> None:
        for index in range(2):
            env = made(spec)
            await env.reset(f"all-train-{index}", 0)
            await env.close()
            stub.num_created -= index == 0  # the server was started anew

    drive(stub.app, "alfworld", play)
    assert stub.num_created == 1
    assert [each["game"] for each in stub.resets] == [0, 1]


def test_server_with_one_account_runs_one_episode_at_once():
    stub = Stub("todo")

    async def play(spec: EnvSpec) -> list[str]:
        assert spec.sessions_per_worker == 1
        first, second = made(spec), made(spec)
        await first.reset("all-train-0", 0)
        waiting = asyncio.create_task(second.reset("all-train-1", 0))
        await asyncio.sleep(0)
        events = [f"waiting {not waiting.done()}, created {stub.num_created}"]
        await first.close()
        events.append(await waiting)
        await second.close()
        return events

    assert drive(stub.app, "todo", play) == ["waiting True, created 1", "question 1"]
    assert stub.num_created == 1


def test_unknown_items_are_refused_without_a_server():
    spec = spec_of("maze", "http://127.0.0.1:9")
    with pytest.raises(UnknownItem):
        asyncio.run(made(spec).reset("all-test-9999", 0))


def test_split_without_items_is_called_empty():
    spec = spec_of("maze", "http://127.0.0.1:9", num_test=0)
    with pytest.raises(UnknownItem, match="subset 'all' has no test items"):
        asyncio.run(made(spec).reset("all-test-0", 0))


@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_every_dialect_has_instructions_in_both_styles(name):
    spec = spec_of(name, "http://127.0.0.1:9")
    assert spec.name == name
    assert all(len(spec.instruction[style]) > 20 for style in Style)


def test_check_names_the_nearest_dialect_and_the_url_form():
    lines = check(RemoteOptions(dialect="textkraft", url="10.0.0.5:36001"))
    assert "the nearest is 'textcraft'" in lines[0]
    assert "http://10.0.0.5:36001" in lines[1]
    with pytest.raises(ConfigError, match="textcraft"):
        spec_of("textkraft", "http://h")
    assert check(RemoteOptions(dialect="maze", url="https://user:word@h:1/lmrl/maze")) == []


def test_stop_that_is_cancelled_closes_the_connections() -> None:
    async def cancelled() -> bool:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1]
            spec: Any = spec_of("maze", f"http://127.0.0.1:{port}")
            server = spec.stop.__self__
            server._kept.append(1)
            server._can_close = True
            session = server._client()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await server.stop()
            return session.closed

    assert asyncio.run(cancelled())
