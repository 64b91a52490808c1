"""Sandboxes of an HTTP server. docs/SANDBOX.md describes the interface."""

import base64
import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any
from urllib.parse import quote

import aiohttp

from common.config.envs import SandboxOptions
from common.http.sessions import open_session
from envhub.sandbox.interface import (
    CommandEnd,
    CommandResult,
    RefusedBySandbox,
    SandboxFailed,
    SandboxFile,
    SandboxRequest,
    check_command,
    check_user,
    check_words,
    run_apart,
)

GRACE_S = 90.0  # Seconds beyond the time limit of a command in which the server must answer.
PROBE_TIMEOUT_S = 10.0
REFUSED = 422  # HTTP status of a command or a file that is impossible.


class RemoteSandboxes:
    """Creates sandboxes at a server."""

    def __init__(self, options: SandboxOptions) -> None:
        self._options = options

    def problem(self) -> str:
        """Return why the server cannot be used, with the remedy; "" if it can."""
        try:
            run_apart(self._probe())
        except SandboxFailed as error:
            return f"{error}; start it with python -m envhub.sandbox.serve, or correct the key"
        return ""

    async def _probe(self) -> None:
        """Check that the server answers. Raises: SandboxFailed."""
        async with _connect(self._options) as session:
            await _call(session, "GET", "/healthz", PROBE_TIMEOUT_S, self._options.url)

    async def create(self, request: SandboxRequest) -> "RemoteSandbox":
        """Return a new sandbox. Raises: SandboxFailed."""
        if request.container is not None and (request.container.build or request.services):
            raise SandboxFailed(
                "a server builds no images and has no services; set environment.docker_image, or"
                " envs.sandbox.backend=docker or podman"
            )
        timeout_s = self._options.start_timeout_s + GRACE_S
        body = {"limits": asdict(request.limits), "folder": request.folder, "image": request.image}
        session = _connect(self._options)
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(session.close)
            answer = await _call(
                session, "POST", "/v1/sandboxes", timeout_s, self._options.url, json=body
            )
            undo.pop_all()
        return RemoteSandbox(
            session, self._options.url, answer["id"], answer.get("folder", request.folder)
        )


class RemoteSandbox:
    """One sandbox of a server."""

    def __init__(self, session: aiohttp.ClientSession, url: str, number: str, folder: str) -> None:
        self._session = session
        self._folder = folder
        self._url = url
        self._path = f"/v1/sandboxes/{quote(number, safe='')}"

    @property
    def folder(self) -> str:
        """The work folder."""
        return self._folder

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        max_output_bytes: int,
        folder: str = "",
        variables: Mapping[str, str] | None = None,
        keeps_processes: bool = False,
        user: str = "",
    ) -> CommandResult:
        """Run a command; see `Sandbox.exec`."""
        check_user(user)
        check_command(argv, folder, variables or {})
        body = {
            "argv": list(argv),
            "timeout_s": timeout_s,
            "max_output_bytes": max_output_bytes,
            "folder": folder,
            "variables": dict(variables or {}),
            "keeps_processes": keeps_processes,
        }
        answer = await self._call("POST", "/exec", timeout_s + GRACE_S, json=body)
        return CommandResult(
            exit_code=answer["exit_code"],
            ended_by=CommandEnd(answer["ended_by"]),
            output=base64.b64decode(answer["output"]),
            num_bytes=answer["num_bytes"],
            seconds=answer["seconds"],
        )

    async def write(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        """Write a regular file; see `Sandbox.write`."""
        check_words("path", [path])
        query = {"path": path, "mode": str(mode)}
        await self._call("PUT", "/file", GRACE_S, params=query, data=content)

    async def write_all(self, files: Sequence[SandboxFile]) -> None:
        """Write files; see `Sandbox.write_all`."""
        for file in files:
            await self.write(file.path, file.content, mode=file.mode)

    async def read(self, path: str, *, max_bytes: int) -> bytes:
        """Return a regular file; see `Sandbox.read`."""
        check_words("path", [path])
        query = {"path": path, "max_bytes": str(max_bytes)}
        answer = await self._call("GET", "/file", GRACE_S, params=query)
        return base64.b64decode(answer["content"])

    async def kill(self) -> None:
        """End all processes of the sandbox."""
        await self._call("POST", "/kill", GRACE_S)

    async def delete(self) -> None:
        """End the sandbox; without an answer, the idle limit of the server ends it."""
        if self._session.closed:
            return
        async with self._session:  # A cancelled request closes the connections, too.
            with contextlib.suppress(SandboxFailed, RefusedBySandbox):
                await self._call("DELETE", "", GRACE_S)

    async def _call(self, method: str, path: str, timeout_s: float, **options: Any) -> Any:
        """Return the answer to a request about this sandbox."""
        return await _call(
            self._session, method, self._path + path, timeout_s, self._url, **options
        )


def _connect(options: SandboxOptions) -> aiohttp.ClientSession:
    """Return a session with the server's token."""
    token = os.environ.get(options.token_env, "")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return open_session(options.url, headers=headers)


async def _call(
    session: aiohttp.ClientSession,
    method: str,
    path: str,
    timeout_s: float,
    url: str,
    **options: Any,
) -> Any:
    """Return the answer to a request as JSON. Raises: RefusedBySandbox, SandboxFailed."""
    where = f"sandbox server {url}"
    limit = aiohttp.ClientTimeout(total=timeout_s)
    try:
        target = url.rstrip("/") + path
        async with session.request(method, target, timeout=limit, **options) as answer:
            body = await answer.json(content_type=None)
            status = answer.status
    except TimeoutError as error:
        raise SandboxFailed(f"{where}: no answer within {timeout_s:g} s") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise SandboxFailed(f"{where}: {error or type(error).__name__}") from error
    if status == REFUSED and isinstance(body, dict) and isinstance(body.get("refused"), str):
        raise RefusedBySandbox(body["refused"])
    if status >= 300 or not isinstance(body, dict):
        raise SandboxFailed(f"{where}: status {status}: {str(body)[:500]}")
    return body
