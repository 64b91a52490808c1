"""Laws of OpenEnv's routes: frames over real sockets of a hub as it is served."""

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import aiohttp
import httpx
import pytest

from common.config.env import RemoteOptions
from common.config.envhub import EnvhubSection
from common.config.envs import EnvsSection
from common.http.serving import QuietSocket, limited_protocol
from envhub import main
from envhub.env import Style
from envhub.envs.textcraft.env import make_spec
from envhub.hosting.sessions import Sessions

T = TypeVar("T")
TOKEN = "open sesame"


class Served:
    """A hub that runs: where, and its table of sessions."""

    def __init__(self, port: int, sessions: Sessions) -> None:
        self.url = f"http://any:{TOKEN.replace(' ', '%20')}@127.0.0.1:{port}"
        self.bare, self.sessions = f"http://127.0.0.1:{port}", sessions


@contextlib.contextmanager
def served(*, capacity: int = 2, idle_s: float = 60.0, **ws: Any) -> Iterator[Served]:
    section = EnvhubSection(capacity=capacity, session_idle_s=idle_s)
    app, sessions = main.build(
        ["textcraft"], section, token=TOKEN, options=EnvsSection(), remote=RemoteOptions()
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        http_protocol = limited_protocol(sessions.counts, app.state.refusals)
        config = main.uvicorn.Config(app, http=http_protocol, ws=QuietSocket, log_config=None, **ws)
        server = main.DrainingServer(config, sessions)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield Served(listener.getsockname()[1], sessions)
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def hub() -> Iterator[Served]:
    with served() as each:
        yield each


class Line:
    """One socket and its frames."""

    def __init__(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        self.ws = ws

    async def ask(self, kind: str, **data: Any) -> dict[str, Any]:
        await self.ws.send_json({"type": kind, "data": data} if data else {"type": kind})
        return await self.ws.receive_json(timeout=60.0)

    async def refused(self, kind: str, **data: Any) -> str:
        answer = await self.ask(kind, **data)
        assert answer["type"] == "error", answer
        return answer["data"]["code"]


def talk(hub: Served, work: Callable[..., Awaitable[T]], num: int = 1) -> T:
    """Return what `work` returns, given as many sockets of TextCraft."""

    async def all_of_it() -> T:
        async with aiohttp.ClientSession() as session, contextlib.AsyncExitStack() as stack:
            url = f"{hub.url}/openenv/textcraft/ws"
            lines = [await stack.enter_async_context(session.ws_connect(url)) for _ in range(num)]
            return await work(*map(Line, lines))

    return asyncio.run(all_of_it())


def until(condition: Callable[[], bool]) -> None:
    """Wait for what happens in the hub's thread."""
    reached = threading.Event()
    for _ in range(500):
        if condition():
            return
        reached.wait(0.01)
    assert condition()


def test_socket_is_opened_and_closed_without_a_log_line(
    hub: Served, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(line: Line) -> None:
        await line.ask("reset", item_id="depth2-test-1")

    with caplog.at_level(logging.INFO):
        talk(hub, work)
    assert [each.getMessage() for each in caplog.records if "connection" in each.message] == []


def test_socket_episode_equals_the_native_one(hub: Served) -> None:
    native = make_spec(EnvsSection()).make(Style.COMPACT)
    item = "depth2-test-1"
    first = native.reset(item, 0)

    async def play(line: Line) -> None:
        begun = (await line.ask("reset", item_id=item))["data"]
        assert begun["observation"]["text"] == first
        assert (begun["reward"], begun["done"]) == (None, False)
        assert begun["metadata"]["item_id"] == item
        told = await line.ask("reset", item_id=item, style="agentgym")
        assert "craft" in told["data"]["metadata"]["instruction"]
        assert (await line.ask("reset", item_id=item))["data"] == begun
        is_done, num = False, 0
        while not is_done:
            action = native.expert_action()
            assert isinstance(action, str)
            expected = native.step(action)
            assert not isinstance(expected, Awaitable)
            told = (await line.ask("step", message=f"Action: {action}"))["data"]
            num, is_done = num + 1, told["done"]
            assert told["observation"]["text"] == expected.observation
            assert (told["reward"], told["done"]) == (expected.reward, expected.done)
            assert told["metadata"]["is_success"] == expected.is_success
        state = (await line.ask("state"))["data"]
        assert (state["step_count"], state["item_id"]) == (num, item)
        assert await line.refused("step", message="get 1 oak log") == "EXECUTION_ERROR"

    talk(hub, play)
    until(lambda: len(hub.sessions) == 0)


def test_bad_frames_are_named_and_keep_the_socket_open(hub: Served) -> None:
    async def play(line: Line) -> None:
        await line.ws.send_str("{")
        assert (await line.ws.receive_json())["data"]["code"] == "INVALID_JSON"
        await line.ws.send_str("[]")
        assert (await line.ws.receive_json())["data"]["code"] == "UNKNOWN_TYPE"
        assert await line.refused("mcp", method="tools/list") == "UNKNOWN_TYPE"
        assert await line.refused("step", message="x") == "EXECUTION_ERROR"  # no episode
        assert await line.refused("step", action="x") == "VALIDATION_ERROR"
        assert await line.refused("reset", indx=3) == "VALIDATION_ERROR"
        assert await line.refused("reset", item_id="nosuch-train-0") == "VALIDATION_ERROR"
        assert await line.refused("reset", split="trian", index=0) == "VALIDATION_ERROR"
        assert await line.refused("reset", split="test", index=10**9) == "VALIDATION_ERROR"
        assert (await line.ask("reset", seed=5))["type"] == "observation"

    talk(hub, play)


def test_same_seed_gives_the_same_task(hub: Served) -> None:
    async def play(line: Line) -> None:
        texts = [(await line.ask("reset", seed=s))["data"]["observation"] for s in (5, 5, 6)]
        assert texts[0] == texts[1] != texts[2]
        assert len(hub.sessions) == 1

    talk(hub, play)


def test_full_hub_refuses_with_a_frame_and_closes(hub: Served) -> None:
    async def play(*lines: Line) -> None:
        for line in lines[:2]:
            await line.ask("reset", seed=1)
        full = (await lines[2].ask("reset", seed=1))["data"]
        assert full["code"] == "CAPACITY_REACHED"
        assert (full["active_sessions"], full["max_sessions"]) == (2, 2)
        assert (await lines[2].ws.receive()).type is aiohttp.WSMsgType.CLOSE
        await lines[0].ws.send_json({"type": "close"})
        assert (await lines[0].ws.receive()).type is aiohttp.WSMsgType.CLOSE
        assert len(hub.sessions) == 1  # its place was free before the socket closed

    talk(hub, play, num=3)


def test_session_ends_with_its_socket_and_is_counted(hub: Served) -> None:
    until(lambda: len(hub.sessions) == 0)  # those of the laws before
    before = hub.sessions.counts["abandoned"]

    async def play(line: Line) -> None:
        await line.ask("reset", seed=1)
        assert len(hub.sessions) == 1

    talk(hub, play)
    until(lambda: len(hub.sessions) == 0)
    assert hub.sessions.counts["abandoned"] == before + 1


def test_silent_client_loses_session_and_socket_after_the_idle_limit() -> None:
    with served(idle_s=0.3) as hub:

        async def play(line: Line) -> None:
            await line.ask("reset", seed=1)
            told = await line.ws.receive_json(timeout=60.0)
            assert told["data"]["code"] == "SESSION_ERROR"
            assert "idle limit" in told["data"]["message"]
            assert (await line.ws.receive()).type is aiohttp.WSMsgType.CLOSE

        talk(hub, play)
        until(lambda: len(hub.sessions) == 0)


def test_socket_requires_token_and_local_origin(hub: Served) -> None:
    async def status(url: str, **headers: str) -> int:
        async with aiohttp.ClientSession() as session:
            try:
                async with session.ws_connect(f"{url}/openenv/textcraft/ws", headers=headers):
                    return 101
            except aiohttp.WSServerHandshakeError as error:
                return error.status

    bearer = {"Authorization": f"Bearer {TOKEN}"}
    assert asyncio.run(status(hub.bare)) == 401
    assert asyncio.run(status(hub.bare, Authorization="Bearer no")) == 401
    assert asyncio.run(status(hub.bare, Origin="https://evil.example", **bearer)) == 403
    assert asyncio.run(status(hub.bare, Origin=hub.bare, **bearer)) == 101
    assert asyncio.run(status(f"{hub.bare}/openenv/nosuch", **bearer)) in (403, 404)


def test_task_routes_list_our_splits(hub: Served) -> None:
    with httpx.Client(base_url=f"{hub.url}/openenv/textcraft", trust_env=False) as client:
        assert client.get("/health").json() == {"status": "healthy"}
        assert client.get("/schema").json()["action"]["required"] == ["message"]
        assert client.get("/list_environments").json() == ["textcraft"]
        splits = {each["name"]: each["type"] for each in client.get("/textcraft/splits").json()}
        assert splits["train"] == "train"
        assert splits["depth1-test"] == "test"

        def ask(verb: str, **body: Any) -> httpx.Response:
            return client.post(f"/textcraft/{verb}", json=body)

        num = ask("num_tasks", split="test").json()["num_tasks"]
        assert num > 0
        last = ask("task", split="test", index=-1).json()["task"]
        assert last["index"] == num - 1
        assert last["id"].startswith("depth")
        tasks = ask("task_range", split="test", start=1, stop=3).json()["tasks"]
        assert [task["index"] for task in tasks] == [1, 2]
        assert len(ask("tasks", split="depth1-test").json()["tasks"]) > 0
        assert ask("task", split="test", index=num).status_code == 404
        assert ask("num_tasks", split="tets").status_code == 404
        assert client.post("/other/num_tasks", json={"split": "test"}).status_code == 404
        assert client.get("/metadata").json()["name"] == "textcraft"


def test_client_that_misses_pings_keeps_session() -> None:
    with served(ws_ping_interval=None) as hub:

        async def play(line: Line) -> None:
            await line.ask("reset", seed=1)
            await asyncio.sleep(0.3)  # The model generates and the socket is not read.
            assert (await line.ask("step", message="inventory"))["type"] == "observation"

        talk(hub, play)
