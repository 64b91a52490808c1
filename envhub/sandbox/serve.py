"""The reference server of remote sandboxes: docs/SANDBOX.md describes the interface.

    SANDBOX_TOKEN=... python -m envhub.sandbox.serve --host 0.0.0.0 --port 8090

It creates sandboxes with a backend of its own machine. A sandbox without requests for the time of
its idle limit is deleted.
"""

import argparse
import asyncio
import base64
import contextlib
import hmac
import logging
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from common.config.envs import SandboxOptions
from common.http.serving import Refusals, limited_protocol
from common.log import configure_logging
from envhub.sandbox.backends import limits_of, make_backend
from envhub.sandbox.interface import (
    RefusedBySandbox,
    Sandbox,
    SandboxBackend,
    SandboxFailed,
    SandboxLimits,
    SandboxRequest,
    work_folder,
)

logger = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MAX_FILE_BYTES = 64 << 20
MAX_OUTPUT_BYTES = 16 << 20
MAX_TIMEOUT_S = 24 * 3600.0
BODY_S = 300.0  # Deadline for the body of a request with the token.
WATCH_S = 1.0  # Interval between two searches for idle sandboxes.


class CreateBody(BaseModel):
    """Body of POST /v1/sandboxes. Limits above those of the server are lowered to them."""

    model_config = ConfigDict(extra="forbid")

    limits: dict[str, int] = Field(default_factory=dict)
    folder: str = Field(default="/app", max_length=200)
    image: str = Field(default="", max_length=500, pattern=r"^([A-Za-z0-9][!-~]*)?$")


class ExecBody(BaseModel):
    """Body of POST /v1/sandboxes/{id}/exec."""

    model_config = ConfigDict(extra="forbid")

    argv: list[str] = Field(min_length=1)
    timeout_s: float = Field(gt=0, le=MAX_TIMEOUT_S)
    max_output_bytes: int = Field(default=1 << 20, ge=2, le=MAX_OUTPUT_BYTES)
    folder: str = ""
    variables: dict[str, str] = Field(default_factory=dict)
    keeps_processes: bool = False


@dataclass(slots=True)
class Held:
    """A live sandbox of the server."""

    sandbox: Sandbox
    used_s: float  # Time of the last request (monotonic).
    num_running: int = 0


class SandboxTable:
    """The live sandboxes of a server by their ids."""

    def __init__(
        self, backend: SandboxBackend, limits: SandboxLimits, *, idle_s: float, capacity: int
    ) -> None:
        self._backend = backend
        self._limits = limits
        self._idle_s = idle_s
        self._capacity = capacity
        self._held: dict[str, Held] = {}
        self._num_opening = 0

    async def create(self, body: CreateBody) -> tuple[str, str]:
        """Return the id and the work folder of a new sandbox.

        Raises: HTTPException, SandboxFailed.
        """
        if len(self._held) + self._num_opening >= self._capacity:
            raise HTTPException(429, f"all {self._capacity} sandboxes are in use")
        request = SandboxRequest(
            limits=self._lowered(body.limits),
            folder=body.folder and work_folder(body.folder),
            image=body.image,
        )
        self._num_opening += 1
        try:
            sandbox = await self._backend.create(request)
        finally:
            self._num_opening -= 1
        number = secrets.token_urlsafe(18)
        self._held[number] = Held(sandbox, time.monotonic())
        return number, sandbox.folder

    def _lowered(self, asked: dict[str, int]) -> SandboxLimits:
        """Return the requested limits, none above the server's. Raises: HTTPException."""
        most: dict[str, int] = asdict(self._limits)
        unknown = asked.keys() - most.keys()
        if unknown:
            raise HTTPException(400, f"unknown limit {min(unknown)!r}; there are {', '.join(most)}")
        return SandboxLimits(**{k: min(v, max(1, asked.get(k, v))) for k, v in most.items()})

    @contextlib.asynccontextmanager
    async def use(self, number: str) -> AsyncIterator[Sandbox]:
        """Yield a sandbox; it is not idle meanwhile. Raises: HTTPException."""
        entry = self._held.get(number)
        if entry is None:
            raise HTTPException(404, "no such sandbox, or it was idle for too long")
        entry.num_running += 1
        try:
            yield entry.sandbox
        except SandboxFailed:
            await self.delete(number)
            raise
        finally:
            entry.num_running -= 1
            entry.used_s = time.monotonic()

    async def delete(self, number: str) -> None:
        """Delete a sandbox; no effect if it does not exist."""
        entry = self._held.pop(number, None)
        if entry is not None:
            await entry.sandbox.delete()

    async def watch(self) -> None:
        """Delete the sandboxes that are idle for too long; only cancellation ends this loop."""
        while True:
            await asyncio.sleep(min(WATCH_S, self._idle_s / 4))
            oldest_s = time.monotonic() - self._idle_s
            entries = self._held.items()
            for number in [n for n, h in entries if not h.num_running and h.used_s < oldest_s]:
                logger.info("sandbox expired id=%s...", number[:6])
                await self.delete(number)

    async def close(self) -> None:
        """Delete all sandboxes."""
        await asyncio.gather(*(self.delete(number) for number in list(self._held)))


def make_sandbox_app(table: SandboxTable, token: str) -> FastAPI:
    """Return the server's application. Without a token every request is accepted."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        watching = asyncio.create_task(table.watch())
        yield
        watching.cancel()
        await table.close()

    app = FastAPI(title="Sandbox server", lifespan=lifespan)

    @app.middleware("http")
    async def check_token(request: Request, call_next: Any) -> Response:
        """Refuse a request without the token."""
        header = request.headers.get("authorization", "").encode()
        if token and not hmac.compare_digest(header, f"Bearer {token}".encode()):
            return _json(401, {"detail": "a valid bearer token is required"})
        if "transfer-encoding" in request.headers:
            return _json(411, {"detail": "a request needs the header Content-Length"})
        if int(request.headers.get("content-length") or 0) > MAX_FILE_BYTES:
            return _json(413, {"detail": f"a request has at most {MAX_FILE_BYTES} bytes"})
        return await call_next(request)

    @app.exception_handler(RefusedBySandbox)
    async def refused(_: Request, error: RefusedBySandbox) -> Response:
        return _json(422, {"refused": str(error)})

    @app.exception_handler(SandboxFailed)
    async def failed(_: Request, error: SandboxFailed) -> Response:
        return _json(503, {"detail": str(error)})

    _add_routes(app, table)
    return app


def server_config(table: SandboxTable, token: str) -> uvicorn.Config:
    """Return the server's configuration, with limits on clients that do not send the token."""
    return uvicorn.Config(
        make_sandbox_app(table, token),
        loop="asyncio",
        http=limited_protocol(Counter(), Refusals(), token=token, body_s=BODY_S),
        ws="none",
        log_config=None,
        access_log=False,
    )


def _json(status: int, body: dict[str, str]) -> Response:
    return JSONResponse(body, status_code=status)


def _add_routes(app: FastAPI, table: SandboxTable) -> None:
    """Add the routes of sandboxes."""

    @app.get("/healthz")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/v1/sandboxes", status_code=201)
    async def create(body: CreateBody) -> dict[str, str]:
        number, folder = await table.create(body)
        return {"id": number, "folder": folder}

    @app.post("/v1/sandboxes/{number}/exec")
    async def execute(number: str, body: ExecBody) -> dict[str, Any]:
        async with table.use(number) as sandbox:
            options = body.model_dump()
            result = await sandbox.exec(options.pop("argv"), **options)
        return {
            "exit_code": result.exit_code,
            "ended_by": result.ended_by.value,
            "output": base64.b64encode(result.output).decode(),
            "num_bytes": result.num_bytes,
            "seconds": result.seconds,
        }

    @app.put("/v1/sandboxes/{number}/file")
    async def write(number: str, path: str, request: Request, mode: int = 0o644) -> dict[str, str]:
        async with table.use(number) as sandbox:
            await sandbox.write(path, await request.body(), mode=mode & 0o777)
        return {}

    @app.get("/v1/sandboxes/{number}/file")
    async def read(number: str, path: str, max_bytes: int = MAX_FILE_BYTES) -> dict[str, str]:
        async with table.use(number) as sandbox:
            content = await sandbox.read(path, max_bytes=min(max(0, max_bytes), MAX_FILE_BYTES))
        return {"content": base64.b64encode(content).decode()}

    @app.post("/v1/sandboxes/{number}/kill")
    async def kill(number: str) -> dict[str, str]:
        async with table.use(number) as sandbox:
            await sandbox.kill()
        return {}

    @app.delete("/v1/sandboxes/{number}")
    async def delete(number: str) -> dict[str, str]:
        await table.delete(number)
        return {}


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    default = SandboxOptions()
    parser = argparse.ArgumentParser(prog="python -m envhub.sandbox.serve", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="Address at which the server listens.")
    parser.add_argument("--port", type=int, default=8090, help="Port; 0 chooses a free one.")
    parser.add_argument("--backend", default="bwrap", choices=("bwrap", "docker", "podman"))
    parser.add_argument(
        "--idle-s",
        "--lease-s",
        dest="idle_s",
        type=float,
        default=600.0,
        help="Deletes unused sandboxes.",
    )
    parser.add_argument("--capacity", type=int, default=16, help="Limits the live sandboxes.")
    parser.add_argument("--token-env", default=default.token_env, help="Variable with the token.")
    for name in ("memory_mib", "processes", "open_files", "max_files", "file_mib", "disk_mib"):
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=int, default=getattr(default, name), help="Upper limit.")
    parser.add_argument("--image", default=default.image, help="Image of containers.")
    return parser.parse_args(words)


def main() -> None:
    """Serve until a signal arrives."""
    arguments = vars(parse_arguments())
    server_names = {"host", "port", "idle_s", "capacity", "token_env"}
    options = SandboxOptions(**{k: v for k, v in arguments.items() if k not in server_names})
    token = os.environ.pop(arguments["token_env"], "")
    if not token and arguments["host"] not in LOOPBACK:
        raise SystemExit(
            f"--host {arguments['host']} needs a token in the variable {arguments['token_env']}"
        )
    configure_logging("sandbox", "INFO")
    backend = make_backend(options)
    if problem := backend.problem():
        raise SystemExit(problem)
    table = SandboxTable(
        backend, limits_of(options), idle_s=arguments["idle_s"], capacity=arguments["capacity"]
    )
    with socket.create_server((arguments["host"], arguments["port"])) as listener:
        host, port = listener.getsockname()[:2]
        print(f"sandboxes: http://{host}:{port}", flush=True)  # noqa: T201 - Scripts read it.
        uvicorn.Server(server_config(table, token)).run(sockets=[listener])


if __name__ == "__main__":
    main()
