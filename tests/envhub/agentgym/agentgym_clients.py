"""AgentGym's Python clients as they appear on the wire, written down from their traffic."""

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn

from common.config.env import RemoteOptions
from common.config.envs import EnvsSection
from envhub.catalogue.registry import Registry
from envhub.env import EnvSpec
from envhub.hosting.sessions import Sessions
from envhub.http.routes import make_app

DIRECT: dict[str, Any] = {
    "timeout": 60.0,
    "trust_env": False,
    "verify": False,
}  # no time lost on certificates


@contextmanager
def serve_app(app: Any, *, at: int = 0, **more: Any) -> Iterator[str]:
    """Serve an application on a port of loopback, 0: a free one, and yield its URL."""
    listener = socket.create_server(("127.0.0.1", at))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, **more))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=20.0)
        assert not thread.is_alive()


def native_name(dialect: str) -> str:
    """Return the environment of ours that a dialect's clients play, where WebArena has none."""
    return {"webarena": "minisites"}.get(dialect, dialect)


def native_item(dialect: str, index: int) -> str:
    """Return the item of ours that has a data index of a dialect."""
    from_agentgym = native_spec(dialect).from_agentgym
    assert from_agentgym is not None
    return from_agentgym(index)


def native_spec(dialect: str) -> EnvSpec:
    """Return the catalogue entry of the environment that a dialect's clients play."""
    name = native_name(dialect)
    return Registry([name], EnvsSection()).spec(name)


@contextmanager
def serve_envs(
    *names: str, remote: RemoteOptions | None = None, capacity: int = 50
) -> Iterator[str]:
    """Serve a hub with these environments and yield its URL."""
    registry = Registry([native_name(name) for name in names], EnvsSection(), remote)
    sessions = Sessions(registry, idle_s=600.0, capacity=capacity, step_timeout_s=30.0)
    app = make_app(sessions, registry, token=None, step_timeout_s=30.0)
    with serve_app(app) as url:
        yield url


class Wire:
    """POST and GET as the clients do them: status 200 and JSON, or the client fails."""

    def __init__(self, base: str, key: str) -> None:
        self.base = base
        self.key = key
        self.number: Any = None  # The instance number from the server.

    def post(self, verb: str, body: dict[str, Any] | None = None) -> Any:
        if body is not None and self.number is not None:
            body = body | {self.key: self.number}
        answer = httpx.post(f"{self.base}/{verb}", json=body, **DIRECT)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def get(self, verb: str) -> Any:
        answer = httpx.get(f"{self.base}/{verb}?{self.key}={self.number}", **DIRECT)
        assert answer.status_code == 200, answer.text
        return answer.json()


class IdClient:
    """The clients that call their instance `id` and read the first observation from the reset."""

    item_keys = {
        "babyai": "data_idx",
        "textcraft": "data_idx",
        "maze": "game",
        "wordle": "seed",
    } | {"sciworld": "data_idx"}

    def __init__(self, name: str, base: str) -> None:
        self.name = name
        self.wire = Wire(base, "id")
        body = {"minecraft_dir": "agentenv_textcraft/", "commands": None, "goal": None}
        created = self.wire.post("create", body if name == "textcraft" else None)
        if name == "textcraft":
            assert isinstance(created["observation"], str)
        self.wire.number = created["id"]
        self.words = self.wire.get("filtered_vocab") if name == "wordle" else []

    def reset(self, index: int) -> str:
        reply = self.wire.post("reset", {self.item_keys[self.name]: index})
        if self.name == "wordle":
            assert all(isinstance(word, str) and len(word) == 5 for word in self.words)
            return "Let's start Wordle!"
        if self.name == "babyai":
            assert (reply["reward"], reply["score"], reply["done"]) == (0, 0, False)
        if self.name == "sciworld":
            return reply["task_description"] + "\n" + reply["observation"]
        return reply["observation"]

    def step(self, text: str) -> tuple[str, float, bool]:
        if self.name in ("textcraft", "babyai"):
            found = re.findall(r"Action:\s*(.*?)(?=\n|$)", text, re.DOTALL)
            action = " ".join(re.sub(r"[^A-Za-z0-9, ]+", "", found[-1]).split())
        else:
            action = text.rpartition("Action:")[2].strip()
        reply = self.wire.post("step", {"action": action})
        has_score = self.name in ("babyai", "sciworld")
        assert isinstance(reply["reward"], int | float)
        return reply["observation"], reply["score" if has_score else "reward"], reply["done"]

    def close(self) -> None:
        assert self.wire.post("close", {}) is True


class IndexClient:
    """The clients that call their instance `env_idx` and ask for the first observation."""

    def __init__(self, name: str, base: str) -> None:
        self.name = name
        self.wire = Wire(base, "env_idx")
        created = self.wire.post("create", {"id": 0} if name == "searchqa" else None)
        self.wire.number = created["env_idx"] if name == "webarena" else created
        assert isinstance(self.wire.number, int)

    def reset(self, index: int) -> str:
        if self.name == "webarena":
            assert (
                self.wire.post("reset", {"seed": 0, "idx": index})["observation"] != "TimeoutError"
            )
        else:
            self.wire.post("reset", {"id" if self.name == "searchqa" else "item_id": index})
        return self.wire.get("observation")

    def step(self, text: str) -> tuple[str, float, bool]:
        if self.name == "sqlgym":
            text = text.split("```sql")[-1].split("```")[0].strip()
        reply = self.wire.post("step", {"action": text})
        if self.name == "webarena":
            is_over = reply["terminated"]
            return reply["observation"], reply["reward"] if is_over else 0, is_over
        return (
            reply["state" if self.name == "sqlgym" else "observation"],
            reply["reward"],
            reply["done"],
        )

    def close(self) -> None:
        if self.name == "webarena":
            assert self.wire.post("close", {}) == {"closed": "closed"}
        elif self.name == "searchqa":
            assert self.wire.post("close", {}) is True


def make_client(name: str, hub: str) -> IdClient | IndexClient:
    """Return the client of an environment, at the hub's AgentGym routes."""
    kind = IdClient if name in IdClient.item_keys else IndexClient
    return kind(name, f"{hub}/agentgym/{native_name(name)}")


def phrase(name: str, action: str) -> str:
    """Return an action as a model would write it for this environment."""
    if name == "sqlgym":
        return f"Thought: join.\n\nAction: ```sql\n{action}\n```"
    if name == "webarena":
        fenced = action if "```" in action else f"```{action}```"
        return f"Let's think. In summary, the next action I will perform is {fenced}"
    return action if name == "searchqa" else f"Thought:\nso be it\n\nAction:\n{action}"
