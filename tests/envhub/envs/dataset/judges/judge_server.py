"""A real endpoint of chat completions whose answers a test chooses."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

PING = "Reply with one word."
Answer = str | int | float  # A text, a status that refuses, or the seconds of a wait.


class JudgeServer:
    """Answers the requests of a judge in order; the last answer repeats. It notes all requests."""

    def __init__(self, *answers: Answer) -> None:
        self.answers: list[Answer] = list(answers)
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.finish_reason = "stop"
        self.headers: dict[str, str] = {}  # Headers of refusals.
        self.num_at_once = 0
        self.most_at_once = 0
        self.released = threading.Event()  # Answers are held back until the event is set.
        self.released.set()
        self.url = ""

    @property
    def prompts(self) -> list[str]:
        """The texts of the requests, without probes."""
        return [text for each in self.requests if (text := each["messages"][-1]["content"]) != PING]

    async def answer(self, request: Request) -> JSONResponse:
        """Answer one request."""
        self.requests.append(await request.json())
        self.keys.append(request.headers.get("authorization", ""))
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        while not self.released.is_set():
            await asyncio.sleep(0.01)
        chosen = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(chosen, float):
            await asyncio.sleep(chosen)
            chosen = "Score: 1"
        self.num_at_once -= 1
        if isinstance(chosen, int):
            content = {"error": f"refused {self.keys[-1]}"}
            return JSONResponse(content, status_code=chosen, headers=self.headers)
        usage = {"prompt_tokens": 7, "completion_tokens": 3}
        message = {"role": "assistant", "content": chosen}
        choice = {"message": message, "finish_reason": self.finish_reason}
        return JSONResponse({"choices": [choice], "usage": usage})


@contextmanager
def serving(judge: JudgeServer, *, port: int = 0) -> Iterator[JudgeServer]:
    """Serve inside the context, at a free port by default."""
    app = FastAPI()
    app.post("/v1/chat/completions")(judge.answer)
    listener = socket.create_server(("127.0.0.1", port))
    config = uvicorn.Config(app, log_level="error", access_log=False, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    judge.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    try:
        yield judge
    finally:
        judge.released.set()
        server.should_exit = True
        thread.join()
        listener.close()


Serve = Callable[..., JudgeServer]
