"""Laws of cached request heads: their answers equal those of the ordinary path."""

import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from common.config.envs import EnvsSection, RemoteOptions
from common.config.services import EnvhubSection
from envhub import main
from envhub.agentgym import serve
from envhub.http import known_heads
from envhub.http.known_heads import HeaderCache
from envhub.http.limits import limited_protocol
from envhub.http.refusals import Refusals

HOST, TOKEN, BASE = "127.0.0.1", "t" * 20, "/agentgym/textcraft"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    port: int
    known: HeaderCache
    answered: list[bytes]  # responses that did not go through the application

    def connect(self) -> socket.socket:
        return socket.create_connection((HOST, self.port), timeout=10.0)


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    app, sessions = main.build(
        ["textcraft"], EnvhubSection(), token=TOKEN, options=EnvsSection(), remote=RemoteOptions()
    )
    known, answered = app.state.known_heads, list[bytes]()

    class Watched(HeaderCache):
        def answer(self, request: bytes, now_s: float) -> bytes | None:
            response = known.answer(request, now_s)
            answered.extend([response] if response is not None else [])
            return response

        def learn(self, request: bytes, *parsed: Any) -> None:
            known.learn(request, *parsed)

    with socket.create_server((HOST, 0)) as listener:
        http = limited_protocol(sessions.counts, Refusals(), Watched(TOKEN, {}, now_s=known.now_s))
        config = main.uvicorn.Config(app, http=http, ws="none", log_config=None)
        server = main.DrainingServer(config, sessions)
        serving = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        serving.start()
        yield Hub(port=listener.getsockname()[1], known=known, answered=answered)
        server.should_exit = True
        serving.join()


@pytest.fixture(autouse=True)
def _begin_anew(hub: Hub) -> None:
    hub.known._heads.clear()
    hub.answered.clear()


def request(path: str, content: object, *, token: str = TOKEN, more: str = "") -> bytes:
    body = json.dumps(content).encode()
    head = f"POST {BASE}{path} HTTP/1.1\r\nhost: hub\r\nauthorization: Bearer {token}\r\n{more}"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def read(connection: socket.socket) -> tuple[int, Any]:
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(65_536)
    head, _, body = received.partition(b"\r\n\r\n")
    (length,) = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
    while len(body) < int(length.partition(b":")[2]):
        body += connection.recv(65_536)
    return int(head.split()[1]), json.loads(body)


def ask(connection: socket.socket, *pieces: bytes) -> tuple[int, Any]:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for piece in pieces:
        connection.sendall(piece)
    return read(connection)


def test_fast_and_ordinary_paths_answer_alike(hub: Hub) -> None:
    with hub.connect() as connection:
        number = ask(connection, request("/create", {}))[1]["id"]
        actions = ["Action: inventory", "Action: get 1 nosuch", "Action: craft 1 x using 1 y"]
        for action in actions:
            step = request("/step", {"id": number, "action": action})
            assert ask(connection, step) == ask(connection, step)
        assert len(hub.answered) == len(actions)
        gone = request("/step", {"id": number + 1, "action": "inventory"})
        assert ask(connection, gone) == ask(connection, gone)
        bad = request("/step", {"id": "x" * len(str(number)), "action": "inventory"})
        for _ in range(2):
            assert ask(connection, bad)[0] == 422
        for action in ("get 1 oak log", "inventory"):
            status, told = ask(connection, request("/step", {"id": number, "action": action}))
            assert (status, "oak log" in told["observation"]) == (200, True)


def test_cached_head_matches_on_every_byte(hub: Hub) -> None:
    with hub.connect() as connection:
        number = ask(connection, request("/create", {}))[1]["id"]
        step = {"id": number, "action": "inventory"}
        for _ in range(2):
            assert ask(connection, request("/step", step))[0] == 200
        assert len(hub.answered) == 1
        for _ in range(2):
            assert ask(connection, request("/step", step, token="u" * 20))[0] == 401
        assert ask(connection, request("/step?x=1", step))[0] == 200
        assert len(hub.answered) == 1


@pytest.mark.parametrize("more", ["connection: keep-alive\r\n", "expect: x\r\n", "te: x\r\n"])
def test_unusual_request_takes_the_ordinary_path(hub: Hub, more: str) -> None:
    with hub.connect() as connection:
        number = ask(connection, request("/create", {}))[1]["id"]
        for _ in range(2):
            step = request("/step", {"id": number, "action": "inventory"}, more=more)
            assert ask(connection, step)[0] == 200
    assert hub.answered == []


def test_split_and_pipelined_requests_are_answered_in_order(hub: Hub) -> None:
    with hub.connect() as connection:
        number = ask(connection, request("/create", {}))[1]["id"]
        got = [request("/step", {"id": number, "action": f"get {n} oak log"}) for n in range(1, 6)]
        assert [ask(connection, each)[0] for each in got[:2]] == [200, 200]
        assert "Got 3" in ask(connection, got[2][:-7], got[2][-7:])[1]["observation"]
        assert "Got 4" in ask(connection, got[3][:30], got[3][30:])[1]["observation"]
        connection.sendall(got[0] + got[1] + got[2])
        told = [read_one(connection) for _ in range(3)]
        assert ["Got 1" in told[0], "Got 2" in told[1], "Got 3" in told[2]] == [True] * 3
        assert "Got 5" in ask(connection, got[4])[1]["observation"]


def test_request_split_at_any_byte_gets_the_same_answer(hub: Hub) -> None:
    with hub.connect() as connection:
        number = ask(connection, request("/create", {}))[1]["id"]
        step = request("/step", {"id": number, "action": "inventory"})
        whole = ask(connection, step)
        cuts = range(1, len(step))
        assert [ask(connection, step[:cut], step[cut:]) for cut in cuts] == [whole] * len(cuts)


@pytest.mark.parametrize("is_one_write", [True, False])
def test_known_and_unknown_pipelined_requests_are_answered_in_order(
    hub: Hub, is_one_write: bool
) -> None:
    with hub.connect() as connection:
        number = ask(connection, request("/create", {}))[1]["id"]
        sent = list[bytes]()
        for count in range(1, 10):
            plain = request("/step", {"id": number, "action": f"get {count} oak log"})
            assert ask(connection, plain)[0] == 200
            head, _, body = plain.partition(b"content-length: ")
            body = body.partition(b"\r\n\r\n")[2]
            chunked = b"%stransfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n"
            other = plain.replace(b"host: hub", b"host: other%d" % count)
            sent.append((plain, chunked % (head, len(body), body), other)[count % 3])
        for each in [b"".join(sent)] if is_one_write else sent:
            connection.sendall(each)
        told = [read_one(connection) for _ in sent]
        assert [f"Got {count} oak" in each for count, each in enumerate(told, 1)] == [True] * 9


def read_one(connection: socket.socket) -> str:
    """Return the body of the next response, and nothing of the one behind it."""
    received = b""
    while not received.endswith(b"}"):
        received += connection.recv(1)
    return received.decode()


def test_head_cache_is_bounded(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_heads, "MAX_HEADS", 3)
    with hub.connect() as connection:
        number = ask(connection, request("/create", {}))[1]["id"]
        for i in range(10):
            step = request("/step", {"id": number, "action": "inventory"}, more=f"x-a: {i}\r\n")
            assert ask(connection, step)[0] == 200
            assert len(hub.known._heads) <= 3


def test_cached_response_equals_a_fresh_one(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "MAX_KEPT", 3)
    actions = ["get 7 oak log", "inventory", "craft 4 oak planks using 1 oak log"] * 3  # no test's
    told: list[list[tuple[int, Any]]] = []
    for most_bytes in (0, 1_024):  # made each time, and kept
        monkeypatch.setattr(serve, "MAX_KEPT_BYTES", most_bytes)
        with hub.connect() as connection:
            numbers = [ask(connection, request("/create", {}))[1]["id"] for _ in range(2)]
            steps = [{"id": number, "action": each} for each in actions for number in numbers]
            told.append([ask(connection, request("/step", each)) for each in steps])
            ask(connection, request("/close", {"id": numbers[0]}))
    assert told[0] == told[1]
    assert told[0][0::2] == told[0][1::2]
