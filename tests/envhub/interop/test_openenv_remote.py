"""Laws of driving OpenEnv servers: our own hub and a scripted server."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import httpx
import pytest
from fastapi import FastAPI, WebSocket
from fastapi.responses import JSONResponse

from common.config.env import RemoteOptions
from common.errors import ConfigError
from envhub.env import EnvFailure, EnvSpec, Style
from envhub.interop.openenv_remote import OpenEnvClosed, OpenEnvEpisode, OpenEnvFailure, make_spec
from tests.envhub.agentgym.agentgym_clients import DIRECT, native_spec, serve_app, serve_envs
from tests.ports import free_port

T = TypeVar("T")
TEXT = {"properties": {"message": {"type": "string"}, "metadata": {}}, "required": ["message"]}


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    with serve_envs("textcraft", capacity=2) as url:
        yield f"{url}/openenv/textcraft"


Answer = Callable[[WebSocket, dict[str, Any]], Awaitable[None]]


def server_of(answer: Answer, schema: dict[str, Any] = TEXT) -> FastAPI:
    """Return an OpenEnv server without a task list; `answer` answers its steps."""
    app = FastAPI()

    @app.get("/schema")
    async def told() -> dict[str, Any]:
        return {"action": schema}

    @app.websocket("/ws")
    async def play(ws: WebSocket) -> None:
        await ws.accept()
        async for text in ws.iter_text():
            frame = json.loads(text)
            if frame["type"] == "reset":
                await reply(ws, {"text": f"reset {frame['data']}"})
            elif frame["type"] == "step":
                await answer(ws, frame["data"])
            elif frame["type"] == "close":
                return await ws.close()

    return app


async def reply(ws: WebSocket, observation: dict[str, Any], **more: Any) -> None:
    data = {"observation": observation, "reward": None, "done": False} | more
    await ws.send_json({"type": "observation", "data": data})


def drive(url: str, play: Callable[[EnvSpec], Awaitable[T]], **changes: Any) -> T:
    async def driven() -> T:
        spec = make_spec(RemoteOptions(url=url, dialect="openenv", **changes))
        try:
            return await play(spec)
        finally:
            assert spec.stop is not None
            await spec.stop()

    return asyncio.run(driven())


def made(spec: EnvSpec) -> OpenEnvEpisode:
    env = spec.make(Style.COMPACT)
    assert isinstance(env, OpenEnvEpisode)
    return env


def play_steps(app: FastAPI, *actions: str, **changes: Any) -> list[Any]:
    """Return the first observation and the results of steps; the episode is closed in any case."""

    async def play(spec: EnvSpec) -> list[Any]:
        env = made(spec)
        try:
            return [await env.reset("all-train-3", 0), *[await env.step(a) for a in actions]]
        finally:
            await env.close()

    with serve_app(app) as url:
        return drive(url, play, **changes)


def test_openenv_client_plays_our_hub_like_the_native_environment(hub: str) -> None:
    async def play(spec: EnvSpec) -> None:
        listed = [i for t in native_spec("textcraft").tasks.values() for i in t.test]
        assert spec.subsets["all"].num_test == len(listed)
        native: Any = native_spec("textcraft").make(Style.COMPACT)
        env = made(spec)
        assert await env.reset("all-test-3", 0) == native.reset(listed[3], 0)
        is_done = False
        while not is_done:
            action = native.expert_action()
            twin, result = native.step(action), await env.step(f"Action: {action}")
            is_done = result.done
            assert (result.observation, result.reward) == (twin.observation, twin.reward)
            assert (result.is_success, result.state) == (twin.is_success, twin.state)
        assert result.is_success
        await env.close()

    drive(hub, play)


def test_hub_serves_an_openenv_server_and_waits_for_capacity(hub: str) -> None:
    remote = RemoteOptions(url=hub, dialect="openenv", num_train=20, num_test=5, timeout_s=10.0)
    body = {"env": "openenv", "item_id": "all-test-0"}
    with serve_envs(remote=remote) as outer, httpx.Client(base_url=outer, **DIRECT) as client:
        sizes = client.get("/v1/envs").json()["openenv"]["subsets"]["all"]
        assert sizes == {"num_train": 20, "num_test": 5, "max_turns": 30}
        ids = [client.post("/v1/sessions", json=body).json()["session_id"] for _ in range(2)]

        async def third_beside() -> httpx.Response:
            async with httpx.AsyncClient(base_url=outer, **DIRECT) as waiting:
                third = asyncio.create_task(waiting.post("/v1/sessions", json=body))
                done, _ = await asyncio.wait([third], timeout=0.5)
                assert not done  # the server has two places
                await waiting.delete(f"/v1/sessions/{ids[0]}")
                return await third

        assert asyncio.run(third_beside()).status_code == 201


def test_socket_closed_by_the_server_is_named_and_counted() -> None:
    async def closes(ws: WebSocket, action: dict[str, Any]) -> None:
        if action["message"] == "close":
            await ws.close(1011, "keepalive ping timeout")
        else:
            await reply(ws, {"text": "on"})

    with serve_app(server_of(closes)) as url:
        remote = RemoteOptions(url=url, dialect="openenv", max_sessions=1)
        body = {"env": "openenv", "item_id": "all-train-0"}
        with serve_envs(remote=remote) as outer, httpx.Client(base_url=outer, **DIRECT) as client:
            for _ in range(2):  # the one place is free again
                path = f"/v1/sessions/{client.post('/v1/sessions', json=body).json()['session_id']}"
                assert client.post(f"{path}/step", json={"action": "on", "seq": 1}).is_success
                failed = client.post(f"{path}/step", json={"action": "close", "seq": 2})
                assert failed.status_code == 500
                assert f"OpenEnvClosed: OpenEnv server {url}" in failed.json()["detail"]
                assert "1011 keepalive ping timeout" in failed.json()["detail"]
                assert client.post(f"{path}/step", json={"action": "on", "seq": 3}).is_client_error
            health = client.get("/healthz").json()
            assert (health["num_failed"], health["num_sessions"]) == (2, 0)


def test_restarting_server_is_awaited_within_the_answer_timeout() -> None:
    async def on(ws: WebSocket, _: dict[str, Any]) -> None:
        await reply(ws, {"text": "on"})

    with serve_app(server_of(on), at=free_port()) as url:
        remote = RemoteOptions(url=url, dialect="openenv", timeout_s=20.0)
        waits, gives_up = (make_spec(replace(remote, timeout_s=s)) for s in (20.0, 0.5))

    async def play() -> str:
        try:
            with pytest.raises(OpenEnvFailure, match=rf"OpenEnv server {url}: no WebSocket: "):
                await made(gives_up).reset("all-train-3", 0)
            env = made(waits)
            begun = asyncio.create_task(env.reset("all-train-3", 0))
            await asyncio.sleep(0.5)
            assert not begun.done()
            with serve_app(server_of(on), at=int(url.rpartition(":")[2])):
                first = await begun
                await env.close()
            return first
        finally:
            for spec in (waits, gives_up):
                assert spec.stop is not None
                await spec.stop()

    assert asyncio.run(play()) == "reset {'seed': 3}"


@pytest.mark.slow
def test_pings_are_answered_while_the_policy_generates() -> None:
    async def on(ws: WebSocket, _: dict[str, Any]) -> None:
        await reply(ws, {"text": "on"})

    async def play(spec: EnvSpec) -> None:
        env = made(spec)
        await env.reset("all-train-0", 0)
        await asyncio.sleep(6.0)  # Many pings pass without a request.
        assert (await env.step("x")).observation == "on"
        await env.close()

    with serve_app(server_of(on), ws_ping_interval=0.1, ws_ping_timeout=5.0) as url:
        drive(url, play)


async def step_on(env: Any) -> None:
    """Send steps as long as the server answers."""
    while (await env.step("x")).observation == "on":
        await asyncio.sleep(0.1)


@pytest.mark.slow
def test_missed_pings_end_episode_by_name() -> None:
    async def on(ws: WebSocket, _: dict[str, Any]) -> None:
        await reply(ws, {"text": "on"})

    async def play(spec: EnvSpec) -> None:
        env = made(spec)
        await env.reset("all-train-0", 0)
        time.sleep(3.0)  # the whole process hangs
        with pytest.raises(OpenEnvClosed, match="closed the socket"):
            await asyncio.wait_for(step_on(env), 60)
        await env.close()

    with serve_app(server_of(on), ws_ping_interval=0.1, ws_ping_timeout=1.0) as url:
        drive(url, play)


def test_silent_server_fails_episode_in_time() -> None:
    async def never(ws: WebSocket, _: dict[str, Any]) -> None:
        await ws.receive()  # It returns when the client has disconnected.

    with pytest.raises(OpenEnvFailure, match=r"a step: no answer within 0\.2 s"):
        play_steps(server_of(never), "x", timeout_s=0.2)


def rewarded(*rewards: Any, **more: Any) -> FastAPI:
    """Return a server with these rewards; the last step ends the episode."""
    left = [*rewards]

    async def answer(ws: WebSocket, _: dict[str, Any]) -> None:
        reward = left.pop(0)
        await reply(ws, {"text": "x"}, reward=reward, done=not left, **more)

    return server_of(answer)


def paid(results: list[Any]) -> list[float]:
    return [round(result.reward, 3) for result in results[1:]]


def test_reward_is_the_last_or_the_bounded_sum() -> None:
    three = ("a", "b", "c")
    assert paid(play_steps(rewarded(0.1, None, 0.5), *three)) == [0.1, 0.1, 0.5]
    assert paid(play_steps(rewarded(0.1, None, 0.5), *three, reward="sum")) == [0.1, 0.1, 0.6]
    between = {"reward": "sum", "min_reward": -2.0, "max_reward": 2.0}
    assert paid(play_steps(rewarded(-1, -1, 4), *three, **between)) == [0.25, 0.0, 1.0]
    for wrong in ((0.0, 1.5), (None, None), (0.0, "1"), (0.0, True, "high")):
        with pytest.raises(EnvFailure, match=r"reward|pays"):
            play_steps(rewarded(*wrong), *"abc"[: len(wrong)])


def test_reward_sum_is_exact_and_bounded_before_the_end() -> None:
    last = play_steps(rewarded(*[0.05] * 20), *["a"] * 20, reward="sum")[-1]
    assert (last.reward, last.is_success) == (1.0, True)
    ninth = {"reward": "sum", "max_reward": 1 / 9}
    assert play_steps(rewarded(*[1 / 81] * 9), *["a"] * 9, **ninth)[-1].reward == 1.0
    with pytest.raises(
        EnvFailure, match="the return of the episode is 2"
    ):  # A horizon would have truncated it.
        play_steps(rewarded(1, 1, 1, 0), "a", "b", reward="sum")


def test_success_is_the_servers_or_the_full_reward() -> None:
    assert not play_steps(rewarded(0.9), "a")[1].is_success
    assert play_steps(rewarded(1.0), "a")[1].is_success
    assert play_steps(rewarded(0.9, metadata={"success": True}), "a")[1].is_success
    assert not play_steps(rewarded(1.0, metadata={"is_success": False}), "a")[1].is_success


@pytest.mark.parametrize("key", ["truncated", "is_truncated"])
def test_truncated_end_of_the_server_is_a_truncation(key: str) -> None:
    _, on, end = play_steps(rewarded(0.5, 0.5, metadata={key: True}), "a", "b")
    assert [(each.done, each.is_truncated) for each in (on, end)] == [(False, False), (True, True)]
    assert not play_steps(rewarded(0.5), "a")[1].is_truncated


def test_score_before_the_first_reward_is_raw_zero() -> None:
    between = {"min_reward": -1.0, "max_reward": 1.0}
    assert paid(play_steps(rewarded(None, -1.0), "a", "b", **between)) == [0.5, 0.0]
    told = server_of(echo, {"properties": {"n": {"type": "integer"}}, "required": ["n"]})
    (refused,) = play_steps(told, "no number", **between)[1:]
    assert (refused.is_valid, refused.reward) == (False, 0.5)


async def echo(ws: WebSocket, action: dict[str, Any]) -> None:
    await reply(ws, {"got": json.dumps(action), "length": 0, "metadata": {"a": 1}})


def test_action_follows_the_servers_schema() -> None:
    number = {"properties": {"move": {"type": "integer"}, "metadata": {}}}
    bad, good = play_steps(server_of(echo, number), "left", "Action: 3", observation_field="got")[
        1:
    ]
    assert (bad.is_valid, good.observation) == (False, '{"move": 3}')
    two = {"properties": {"x": {"type": "integer"}, "y": {}}, "required": ["x", "y"]}
    given = 'I think.\nAction: ```json\n{"x": 1, "y": "b"}\n```'
    bad, good = play_steps(server_of(echo, two), "x=1", given, observation_field="got")[1:]
    assert (bad.is_valid, good.observation) == (False, '{"x": 1, "y": "b"}')
    with pytest.raises(ConfigError, match=r"env\.action_field='z'.*\['x', 'y'\]"):
        play_steps(server_of(echo, two), action_field="z")
    with pytest.raises(OpenEnvFailure, match=r"observation_field.*it has got"):
        play_steps(server_of(echo), "a", observation_field="told")


def test_refused_action_is_reported_to_agent() -> None:
    async def refuse(ws: WebSocket, _: dict[str, Any]) -> None:
        problems = [{"loc": ["message"], "msg": "too long"}]
        data = {"message": "Invalid", "code": "VALIDATION_ERROR", "errors": problems}
        await ws.send_json({"type": "error", "data": data})

    _, result = play_steps(server_of(refuse), "a")
    assert not result.is_valid
    assert result.observation == "Invalid; message: too long"


def test_server_error_is_never_a_reward() -> None:
    async def fail(ws: WebSocket, _: dict[str, Any]) -> None:
        data = {"message": "no disk", "code": "EXECUTION_ERROR"}
        await ws.send_json({"type": "error", "data": data})

    with pytest.raises(OpenEnvFailure, match=r"a step was refused \(EXECUTION_ERROR\): no disk"):
        play_steps(server_of(fail), "a")


def test_server_tools_are_listed_and_called() -> None:
    async def tools(ws: WebSocket, action: dict[str, Any]) -> None:
        if action["type"] == "list_tools":
            about = {
                "name": "add",
                "description": "Adds.",
                "input_schema": {"properties": {"a": 1}},
            }
            await reply(ws, {"tools": [about]})
        else:
            await reply(ws, {"got": json.dumps(action)})

    schema = TEXT | {"title": "CallToolAction"}
    call = 'Action: {"tool": "add", "arguments": {"a": 2}}'
    first, wrong, right = play_steps(server_of(tools, schema), '{"tool": "sub"}', call)
    assert "add: Adds." in first
    assert (wrong.is_valid, "there are: add" in wrong.observation) == (False, True)
    expected = {"type": "call_tool", "tool_name": "add", "arguments": {"a": 2}}
    assert json.loads(right.observation) == expected


@pytest.mark.parametrize("answer", [(500, {"num_tasks": 3}), (200, {"detail": "no tasks"})])
def test_split_without_a_size_is_refused(answer: tuple[int, dict[str, Any]]) -> None:
    app = server_of(lambda ws, _: reply(ws, {}))

    @app.get("/list_environments")
    async def names() -> list[str]:
        return ["tasks"]

    @app.get("/tasks/splits")
    async def splits() -> list[dict[str, str]]:
        return [{"name": "train", "type": "train"}]

    @app.post("/tasks/num_tasks")
    async def size() -> JSONResponse:
        return JSONResponse(answer[1], status_code=answer[0])

    with serve_app(app) as url, pytest.raises(ConfigError, match="without a number for the split"):
        make_spec(RemoteOptions(url=url, dialect="openenv"))


def test_non_openenv_server_is_refused_before_the_start(hub: str) -> None:
    with pytest.raises(ConfigError, match=r"env\.url=.*no answer"):
        drive("http://127.0.0.1:9", _nothing)
    with pytest.raises(ConfigError, match=r"env\.url=.*not an OpenEnv server"):
        drive(hub.rpartition("/openenv")[0], _nothing)
    with pytest.raises(ConfigError, match=r"env\.test_items='tset'.*splits are"):
        drive(hub, _nothing, test_items="tset")


async def _nothing(_: EnvSpec) -> None:
    pass
