"""A hub on a free port, served by uvicorn in a thread, and an environment that misbehaves."""

import socket
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
import uvicorn

from envhub import registry as registry_module
from envhub.env import EnvSpec, StepResult, Style, SubsetSpec, parse_item
from envhub.registry import Registry
from envhub.server import make_app
from envhub.sessions import Sessions

FAULTY_SUBSETS = {"any": SubsetSpec(num_train=10, num_test=10, max_turns=5)}


class FaultyEnv:
    """Counts its steps; raises on `raise`, overruns on `slow`, ends on `end`."""

    def __init__(self, style: Style) -> None:
        self.num_steps = 0

    def reset(self, item_id: str, seed: int) -> str:
        parse_item(item_id, FAULTY_SUBSETS)
        return "begun"

    def step(self, action: str) -> StepResult:
        if action == "raise":
            raise KeyError("a bug in the environment")
        if action == "slow":
            time.sleep(0.15)
        self.num_steps += 1
        is_end = action == "end"
        return StepResult(
            observation=f"step {self.num_steps}",
            reward=float(is_end),
            done=is_end,
            is_valid=True,
        )

    def valid_actions(self) -> list[str]:
        return ["end"]

    def expert_action(self) -> str | None:
        return None

    def render(self) -> str:
        return f"{self.num_steps} steps"

    def fingerprint(self) -> str:
        return "same"


def make_spec() -> EnvSpec:
    """Returns the faulty environment's catalogue entry."""
    return EnvSpec(
        name="faulty", subsets=FAULTY_SUBSETS, instruction={Style.COMPACT: ""}, make=FaultyEnv
    )


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Hub:
    """A served hub: an HTTP client for it, its clock and its table."""

    def __init__(self, client: httpx.Client, clock: Clock, sessions: Sessions) -> None:
        self.client = client
        self.clock = clock
        self.sessions = sessions

    def open(self, env: str = "faulty", item_id: str = "any-train-0") -> str:
        """Returns the path of a new session."""
        answer = self.client.post("/v1/sessions", json={"env": env, "item_id": item_id})
        assert answer.status_code == 201, answer.text
        return f"/v1/sessions/{answer.json()['session_id']}"

    def step(self, path: str, action: str, seq: int) -> httpx.Response:
        return self.client.post(f"{path}/step", json={"action": action, "seq": seq})


@pytest.fixture(scope="session", autouse=True)
def faulty_environment() -> Iterator[None]:
    registry_module.LOADERS["faulty"] = __name__
    yield
    del registry_module.LOADERS["faulty"]


@pytest.fixture
def serve_hub() -> Iterator[Callable[..., Hub]]:
    """Yields a function that starts a hub; all are stopped at the end of the test."""
    running: list[tuple[uvicorn.Server, threading.Thread, httpx.Client]] = []

    def start(*, token: str | None = None, capacity: int = 100) -> Hub:
        clock = Clock()
        registry = Registry(["babyai", "textcraft", "faulty"])
        sessions = Sessions(
            registry, lease_s=60.0, capacity=capacity, step_timeout_s=0.1, now_s=clock
        )
        app = make_app(sessions, registry, token=token, step_timeout_s=0.1)
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        port = listener.getsockname()[1]
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=5.0, trust_env=False)
        running.append((server, thread, client))
        return Hub(client, clock, sessions)

    yield start
    for server, thread, client in running:
        client.close()
        server.should_exit = True
        thread.join(timeout=5.0)
        assert not thread.is_alive()
