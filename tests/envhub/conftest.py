"""A hub on a free port, served by uvicorn in a thread, with environments that misbehave."""

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import httpx
import pytest
import uvicorn

from envhub.catalogue import registry as registry_module
from envhub.catalogue.registry import Registry
from envhub.hosting.sessions import Sessions
from envhub.http.routes import make_app

MISBEHAVING = ("faulty", "lingering", "waiting")
NAMES = ("babyai", "nim", "textcraft", "faulty", "waiting")


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def live_session(sessions: Sessions, session_id: str) -> Any:
    (session,) = [each for each in sessions._live if each.session_id == session_id]
    return session


class Hub:
    """A served hub: an HTTP client for it, its clock and its table."""

    def __init__(
        self,
        client: httpx.Client,
        clock: Clock,
        sessions: Sessions,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.client = client
        self.clock = clock
        self.sessions = sessions
        self.loop = loop

    def open(self, env: str = "faulty", item_id: str = "any-train-0") -> str:
        """Return the path of a new session."""
        answer = self.client.post("/v1/sessions", json={"env": env, "item_id": item_id})
        assert answer.status_code == 201, answer.text
        return f"/v1/sessions/{answer.json()['session_id']}"

    def session(self, path: str) -> Any:
        """Return the live session at a path."""
        return live_session(self.sessions, path.rpartition("/")[2])

    def step(self, path: str, action: str, seq: int) -> httpx.Response:
        return self.client.post(f"{path}/step", json={"action": action, "seq": seq})

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Return what a coroutine returns in the hub's own event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout=60.0)


@pytest.fixture(scope="module", autouse=True)
def misbehaving_environments() -> Iterator[None]:
    """Other tests of the same process see only the environments of the product."""
    for name in MISBEHAVING:
        registry_module.LOADERS[name] = f"tests.envhub.inside.{name}"
    yield
    for name in MISBEHAVING:
        del registry_module.LOADERS[name]


class _Server:
    """A hub in a thread with an event loop of its own."""

    def __init__(self, sessions: Sessions, registry: Registry, token: str | None) -> None:
        app = make_app(sessions, registry, token=token, step_timeout_s=10.0)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.loop = asyncio.new_event_loop()
        config = uvicorn.Config(app, log_config=None, access_log=False)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.loop.run_until_complete(self._server.serve(sockets=[self.listener]))
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=60.0)
        assert not self._thread.is_alive()


@pytest.fixture
def serve_hub() -> Iterator[Callable[..., Hub]]:
    """Yield a function that starts a hub; all are stopped at the end of the test."""
    yield from _serve_hubs()


@pytest.fixture(scope="module")
def serve_hubs() -> Iterator[Callable[..., Hub]]:
    """The same, until the end of the module."""
    yield from _serve_hubs()


def _serve_hubs() -> Iterator[Callable[..., Hub]]:
    running: list[tuple[_Server, httpx.Client]] = []

    def start(*outsiders: str, token: str | None = None, capacity: int = 100) -> Hub:
        clock = Clock()
        registry = Registry([*NAMES, *map(_reference, outsiders)])
        sessions = Sessions(
            registry, idle_s=60.0, capacity=capacity, step_timeout_s=10.0, now_s=clock
        )
        server = _Server(sessions, registry, token)
        port = server.listener.getsockname()[1]
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0, trust_env=False)
        running.append((server, client))
        return Hub(client, clock, sessions, server.loop)

    yield start
    for server, client in running:
        client.close()
        server.stop()


def _reference(name: str) -> str:
    return name if ":" in name else f"tests.envhub.outside:{name}"
