"""A typical environment server as a baseline.

Run as `python -m benchmarks.envhub.reference PORT`.

It is one FastAPI application with synchronous handlers in the framework's default thread pool. It
stores environments in a dict by counted ids. Bodies and answers are pydantic models, and a failure
is returned as an answer. The environments are the hub's own.

It has no expiry, authentication, limits or repeated steps.
"""

import os
import sys
import threading

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from common.config.envs import EnvsSection
from envhub.env import Env, EnvSpec, Style
from envhub.envs.babyai.env import make_spec as make_babyai
from envhub.envs.textcraft.env import make_spec as make_textcraft


class Number(BaseModel):
    id: int


class ReferenceResetBody(Number):
    item_id: str


class StepBody(Number):
    action: str


class State(BaseModel):
    """Answer of reset and step; `error` when the call failed."""

    observation: str = ""
    reward: float = 0.0
    done: bool = False
    error: str | None = None


class EnvTable:
    """Environments by counted id; a lock guards the counter only."""

    def __init__(self, spec: EnvSpec) -> None:
        self._spec = spec
        self._envs: dict[int, Env] = {}
        self._num_made = 0
        self._lock = threading.Lock()

    def create(self) -> Number:
        with self._lock:
            number = self._num_made
            self._num_made += 1
        self._envs[number] = self._spec.make(Style.COMPACT)  # type: ignore[assignment]
        return Number(id=number)

    def reset(self, body: ReferenceResetBody) -> State:
        try:
            return State(observation=self._envs[body.id].reset(body.item_id, 0))
        except (LookupError, RuntimeError, ValueError) as error:
            return State(error=str(error))

    def step(self, body: StepBody) -> State:
        try:
            result = self._envs[body.id].step(body.action)
        except (LookupError, RuntimeError, ValueError) as error:
            return State(error=str(error))
        return State(observation=result.observation, reward=result.reward, done=result.done)

    def close(self, body: Number) -> bool:
        return self._envs.pop(body.id, None) is not None


def make_app() -> FastAPI:
    app = FastAPI()
    options = EnvsSection()
    for spec in (make_textcraft(options), make_babyai(options)):
        table = EnvTable(spec)
        for handle in (table.create, table.reset, table.step, table.close):
            app.post(f"/{spec.name}/{handle.__name__}")(handle)
    return app


def main() -> None:
    """Serve on a port of loopback.

    With LONGSTRIDE_BENCH_PLAIN=1 the server uses the defaults of `pip install uvicorn` (asyncio's
    loop, h11). Otherwise it uses the hub's loop and parser.
    """
    is_plain = os.environ.get("LONGSTRIDE_BENCH_PLAIN") == "1"
    uvicorn.run(
        make_app(),
        host="127.0.0.1",
        port=int(sys.argv[1]),
        loop="asyncio" if is_plain else "uvloop",
        http="h11" if is_plain else "httptools",
        log_level="warning",
    )


if __name__ == "__main__":
    main()
