"""Two small real servers: a hub with a counting game, and an OpenAI-compatible endpoint."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

START_S = 60.0


@contextlib.contextmanager
def serve(app: FastAPI, *, port: int = 0, has_lifespan: bool = False) -> Iterator[str]:
    """Serve an app in a thread; yields its address."""
    lifespan = "on" if has_lifespan else "off"
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", lifespan=lifespan)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    started = threading.Event()
    for _ in range(int(START_S / 0.01)):
        if server.started:
            break
        started.wait(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(START_S)


@dataclass
class ToyHub:
    """The game: answer "go" twice. Item <subset>-test-9 fails to open; in a broken hub, all do.

    The first `num_paused` calls of sessions find the environment paused. The first `num_full`
    openings find no free session.
    """

    is_broken: bool = False
    num_paused: int = 0
    num_full: int = 0
    step_s: float = 0.0
    opened: list[str] = field(default_factory=list[str])
    turns: dict[str, int] = field(default_factory=dict[str, int])

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/v1/envs")
        async def envs() -> Any:
            subset = {"num_train": 5, "num_test": 10, "max_turns": 3}
            paper = {"items": {"a": ["a-test-4"]}, "turns": 7, "note": "not theirs"}
            return {
                "toy": {
                    "subsets": {"a": subset, "b": subset},
                    "instruction": {"compact": "Play."},
                    "note": "our toys",
                    "paper": paper,
                }
            }

        @app.get("/v1/envs/toy/tasks")
        async def tasks() -> Any:
            return {"A": {"train": [], "test": ["a-test-2", "a-test-5"]}}

        @app.post("/v1/sessions", status_code=201)
        async def open_session(request: Request) -> Any:
            item_id = (await request.json())["item_id"]
            if self.num_paused > 1:
                self.num_paused -= 1
                return JSONResponse({"detail": "judge x is down"}, status_code=424)
            if self.num_full:
                self.num_full -= 1
                headers = {"Retry-After": "0.01"}
                return JSONResponse({"detail": "full"}, status_code=429, headers=headers)
            self.opened.append(item_id)
            if self.is_broken or item_id.endswith("-9"):
                return JSONResponse({"detail": "the game is broken"}, status_code=500)
            name = f"s{len(self.opened)}"
            self.turns[name] = 0
            return {"session_id": name, "observation": f"begin {item_id}"}

        @app.post("/v1/sessions/{name}/step")
        async def step(name: str, request: Request) -> Any:
            if name not in self.turns:
                return JSONResponse({"detail": "no such session"}, status_code=404)
            if self.num_paused:  # The last one is a step.
                self.num_paused -= 1
                return JSONResponse({"detail": "judge x is down"}, status_code=424)
            await asyncio.sleep(self.step_s)
            is_go = (await request.json())["action"] == "go"
            self.turns[name] += is_go
            done = self.turns[name] == 2
            reward = self.turns[name] / 2
            return {"observation": "on", "reward": reward, "done": done, "is_valid": is_go}

        @app.get("/v1/sessions/{name}/hint")
        async def hint(name: str) -> Any:
            if name not in self.turns:
                return JSONResponse({"detail": "no such session"}, status_code=404)
            return {"valid_actions": ["go"], "expert_action": "go"}

        @app.delete("/v1/sessions/{name}", status_code=204)
        async def close(name: str) -> Response:
            return Response(status_code=204)

        return app


@dataclass
class ToyEndpoint:
    """Answers by its script (a status, a text or a whole body), and "go" afterwards."""

    script: list[int | str | dict[str, Any]] = field(default_factory=list[Any])
    texts: dict[int, str] = field(default_factory=dict[int, str])  # status -> body
    retry_after: str = "0.01"
    requests: list[dict[str, Any]] = field(default_factory=list[Any])
    keys: list[str | None] = field(default_factory=list[Any])
    delay_s: float = 0.0
    num_at_once: int = 0
    most_at_once: int = 0

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/v1/chat/completions")
        async def complete(request: Request) -> Any:
            self.requests.append(await request.json())
            self.keys.append(request.headers.get("authorization"))
            self.num_at_once += 1
            self.most_at_once = max(self.most_at_once, self.num_at_once)
            await asyncio.sleep(self.delay_s)
            self.num_at_once -= 1
            act = self.script.pop(0) if self.script else "go"
            if isinstance(act, int):
                headers = {"Retry-After": self.retry_after} if act == 429 else {}
                return Response(self.texts.get(act, "no"), status_code=act, headers=headers)
            if isinstance(act, dict):
                return act
            message = {"role": "assistant", "content": act}
            return {
                "choices": [{"message": message, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 7, "completion_tokens": 2},
            }

        return app
