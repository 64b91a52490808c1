"""The HTTP face of the hub: routes, status codes, nothing else."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from envhub.env import StepResult, Style, UnknownItem
from envhub.guard import Guard
from envhub.registry import Registry, UnknownEnv
from envhub.sessions import (
    CapacityFull,
    EnvRaised,
    EnvTimeout,
    SessionConflict,
    Sessions,
    SessionUnknown,
)

MAX_BODY_BYTES = 64 * 1024
RETRY_AFTER_S = 1
MAX_SEED = 2**63 - 1

STATUS_CODES: dict[type[Exception], int] = {
    UnknownEnv: 404,
    UnknownItem: 404,
    SessionUnknown: 404,
    SessionConflict: 409,
    CapacityFull: 429,
    EnvRaised: 500,
    EnvTimeout: 504,
}


class CreateRequest(BaseModel):
    """Body of POST /v1/sessions."""

    model_config = ConfigDict(extra="forbid")

    env: str = Field(max_length=200)
    item_id: str = Field(max_length=200)
    seed: int = Field(default=0, ge=0, le=MAX_SEED)
    style: Style = Style.COMPACT


class StepRequest(BaseModel):
    """Body of POST /v1/sessions/{id}/step; `seq` starts at 1 and grows by one."""

    model_config = ConfigDict(extra="forbid")

    action: str
    seq: int = Field(ge=1, le=MAX_SEED)


def make_app(
    sessions: Sessions, registry: Registry, *, token: str | None, step_timeout_s: float
) -> FastAPI:
    """Returns the hub's application.

    Args:
        sessions: the table the routes work on; its leases are reaped while the app runs.
        registry: what GET /v1/envs lists.
        token: bearer token of every route but /healthz; None asks for none.
        step_timeout_s: told to clients in GET /healthz; `sessions` enforces it.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        reaper = asyncio.create_task(sessions.reap())
        yield
        reaper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reaper

    app = FastAPI(title="Longstride environment hub", lifespan=lifespan)
    app.add_middleware(Guard, token=token, max_body_bytes=MAX_BODY_BYTES)
    for error, status in STATUS_CODES.items():
        app.add_exception_handler(error, _failure(status))
    _add_catalogue_routes(app, sessions, registry, step_timeout_s=step_timeout_s)
    _add_session_routes(app, sessions)
    return app


def _add_catalogue_routes(
    app: FastAPI, sessions: Sessions, registry: Registry, *, step_timeout_s: float
) -> None:
    @app.get("/healthz")
    async def healthz() -> Response:
        counts = {f"num_{name}": num for name, num in sorted(sessions.counts.items())}
        state = {"status": "ok", "num_sessions": len(sessions), "step_timeout_s": step_timeout_s}
        return _json(state | counts)

    @app.get("/v1/envs")
    async def list_envs() -> Response:
        return _json(registry.catalogue())


def _add_session_routes(app: FastAPI, sessions: Sessions) -> None:
    @app.post("/v1/sessions", status_code=201)
    async def create(body: CreateRequest) -> Response:
        session_id, observation = sessions.create(
            body.env, body.item_id, seed=body.seed, style=body.style
        )
        return _json({"session_id": session_id, "observation": observation}, status=201)

    @app.post("/v1/sessions/{session_id}/step")
    async def step(session_id: str, body: StepRequest) -> Response:
        return _json(_as_json(sessions.step(session_id, body.action, body.seq)))

    @app.get("/v1/sessions/{session_id}/hint")
    async def hint(session_id: str) -> Response:
        valid_actions, expert_action = sessions.hint(session_id)
        return _json({"valid_actions": valid_actions, "expert_action": expert_action})

    @app.get("/v1/sessions/{session_id}/render")
    async def render(session_id: str) -> Response:
        text, fingerprint = sessions.render(session_id)
        return _json({"text": text, "fingerprint": fingerprint})

    @app.delete("/v1/sessions/{session_id}", status_code=204)
    async def delete(session_id: str) -> Response:
        sessions.delete(session_id)
        return Response(status_code=204)


def _as_json(result: StepResult) -> dict:
    return {
        "observation": result.observation,
        "reward": result.reward,
        "done": result.done,
        "is_valid": result.is_valid,
    }


def _json(content: dict, *, status: int = 200) -> Response:
    """Returns a JSON response; FastAPI's own way would validate every answer once more."""
    return Response(json.dumps(content), status_code=status, media_type="application/json")


def _failure(status: int) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Returns the handler that answers one kind of error with its text."""

    async def handle(_: Request, error: Exception) -> Response:
        response = _json({"detail": str(error)}, status=status)
        if status == 429:
            response.headers["Retry-After"] = str(RETRY_AFTER_S)
        return response

    return handle
