"""Laws of connections to the hub before their token is checked, over real HTTP."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from common.config.env import RemoteOptions
from common.config.envhub import EnvhubSection
from common.config.envs import EnvsSection
from common.http import serving as limits
from envhub import main

HOST = "127.0.0.1"


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(limits, "MAX_CONNECTIONS", 100)
    app, sessions = main.build(
        ["textcraft"], EnvhubSection(), token="t", options=EnvsSection(), remote=RemoteOptions()
    )
    with socket.create_server((HOST, 0)) as listener:
        config = main.uvicorn.Config(
            app,
            http=limits.limited_protocol(sessions.counts, app.state.refusals, token="t"),
            ws="none",
            log_config=None,
        )
        server = main.DrainingServer(config, sessions)
        serving = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        serving.start()
        yield listener.getsockname()[1]
        server.should_exit = True
        serving.join()


def health(port: int) -> dict[str, object]:
    return httpx.get(f"http://{HOST}:{port}/healthz", timeout=20.0).json()


def test_endless_headers_are_refused_in_bounded_memory(port: int) -> None:
    memory_before = psutil.Process().memory_info().rss
    with socket.create_connection((HOST, port)) as stranger:
        stranger.settimeout(5.0)
        sent, line = 0, b"X-A: " + b"a" * 8_000 + b"\r\n"
        try:
            stranger.sendall(b"GET /v1/envs HTTP/1.1\r\n")
            while sent < 40 << 20:
                stranger.sendall(line)
                sent += len(line)
        except OSError:
            pass
        assert sent < 40 << 20
    assert psutil.Process().memory_info().rss - memory_before < 30 << 20
    assert health(port)["num_large_headers"] == 1


def test_unfinished_request_times_out(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    usual_s = limits.REQUEST_S
    monkeypatch.setattr(limits, "REQUEST_S", 0.5)
    with socket.create_connection((HOST, port)) as silent:
        silent.settimeout(60.0)
        with socket.create_connection((HOST, port)) as slow:
            slow.settimeout(60.0)
            slow.sendall(b"POST /v1/sessions HTTP/1.1\r\nX: ")
            for each in (silent, slow):
                with contextlib.suppress(ConnectionResetError):
                    assert each.recv(1) == b"", "an answer"
    monkeypatch.setattr(limits, "REQUEST_S", usual_s)
    assert health(port)["num_slow"] == 2


def test_idle_connections_block_no_client(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REQUEST_S", 30.0)  # it is their number that is too large
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(socket.create_connection((HOST, port), timeout=60))
        deadline = time.monotonic() + 60
        while int(str(health(port)["num_too_many"])) < 190:  # a hub that is busy ends them later
            assert time.monotonic() < deadline
        assert health(port)["status"] == "ok"


ANSWERED = (
    b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n",
    b"GET /v1/envs HTTP/1.1\r\nhost: a\r\nauthorization: Bearer no\r\n\r\n",
    b"POST /v1/sessions HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n{",
)


@pytest.mark.parametrize("sent", ANSWERED)
def test_answered_connections_without_the_token_block_no_client(
    port: int, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(limits, "REQUEST_S", 30.0)
    address, headers = f"http://{HOST}:{port}", {"Authorization": "Bearer t"}
    with contextlib.ExitStack() as stack, httpx.Client(headers=headers, timeout=20.0) as client:
        assert client.get(f"{address}/v1/envs").status_code == 200
        for _ in range(150):
            stranger = stack.enter_context(socket.create_connection((HOST, port), timeout=60))
            stranger.sendall(sent)
            assert stranger.recv(12).startswith(b"HTTP/1.1 ")
        assert httpx.get(f"{address}/v1/envs", headers=headers, timeout=20.0).status_code == 200
        assert client.get(f"{address}/v1/envs").status_code == 200


def step_request(number: int, action: str) -> bytes:
    body = json.dumps({"id": number, "action": action}).encode()
    head = "POST /agentgym/textcraft/step HTTP/1.1\r\nhost: hub\r\nauthorization: Bearer t\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def read_observations(connection: socket.socket, num: int) -> list[str]:
    received = b""
    while received.count(b'"observation"') < num or not received.endswith(b"}"):
        received += connection.recv(65_536)
    bodies = [each.partition(b"\r\n\r\n")[2] for each in received.split(b"HTTP/1.1 ")[1:]]
    return [json.loads(each)["observation"] for each in bodies]


def test_split_and_pipelined_requests_are_answered_in_order(port: int) -> None:
    own = {"Authorization": "Bearer t"}
    base = f"http://{HOST}:{port}/agentgym/textcraft"
    number = httpx.post(f"{base}/create", headers=own, json={}).json()["id"]
    steps = [step_request(number, f"get {count} oak log") for count in (1, 2, 3)]
    with socket.create_connection((HOST, port), timeout=10.0) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for cut in range(1, len(steps[0])):
            connection.sendall(steps[0][:cut])
            connection.sendall(steps[0][cut:])
            assert read_observations(connection, 1) == ["Got 1 oak log"]
        connection.sendall(b"".join(steps))
        assert read_observations(connection, 3) == [f"Got {n} oak log" for n in (1, 2, 3)]


def test_refusals_are_counted_by_sender_and_reason(port: int) -> None:
    url, own = f"http://{HOST}:{port}", {"Authorization": "Bearer t"}
    for _ in range(3):
        assert httpx.get(f"{url}/v1/envs", headers={"Authorization": "Bearer no"}).is_error
    assert httpx.post(f"{url}/v1/sessions", headers=own, content=b"{").status_code == 422
    assert httpx.post(f"{url}/v1/sessions", headers=own, content=b"x" * 70_000).status_code == 413
    with socket.create_connection((HOST, port), timeout=60) as stranger:
        stranger.sendall(b"\x00\x01\r\n\r\n")
        assert stranger.recv(12) == b"HTTP/1.1 400"
    told = httpx.get(f"{url}/metrics", headers=own).text
    for reason, num in (("token", 3), ("invalid", 1), ("too_large", 1), ("malformed", 1)):
        line = f'envhub_refused_requests_total{{address="{HOST}",reason="{reason}"}} {num}.0'
        assert line in told
