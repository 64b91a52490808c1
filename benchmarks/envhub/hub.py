"""A hub as a separate process, and an HTTP client with one kept-alive connection, for measurements.

A request costs less processor time in the client than in the hub, so the hub limits the rate.
"""

import contextlib
import json
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp
import psutil

from common.host.child_process import ChildFailed, ChildProcess, wait_until_ended
from common.http.sessions import open_session
from common.memory import resident_bytes
from common.repository import ROOT

REQUEST_TIMEOUT_S = 60.0


class HubAnswer(RuntimeError):
    """A service answered with an unexpected status. It holds status and body."""

    def __init__(self, status: int, body: bytes, *, request: str) -> None:
        super().__init__(f"{request} answered {status}: {body[:300].decode(errors='replace')}")
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceTarget:
    """The URL of a service and its token; None: no token."""

    url: str
    token: str | None = None

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname or "127.0.0.1", parts.port or 80


class Client:
    """JSON requests over one connection, which is reopened if the service closed it."""

    def __init__(self, target: ServiceTarget) -> None:
        self._http = open_session(
            target.url,
            is_own=True,
            base_url=target.url,
            connector=aiohttp.TCPConnector(limit=1),
            headers={"Authorization": f"Bearer {target.token}"} if target.token else {},
            timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def ask(self, method: str, path: str, content: object = None) -> tuple[int, bytes]:
        """Return status and body of any answer.

        Raises: OSError: the connection was lost, or no answer came within REQUEST_TIMEOUT_S.
        """
        try:
            async with self._http.request(method, path, json=content) as response:
                return response.status, await response.read()
        except aiohttp.ClientError as error:
            raise ConnectionError(f"{method} {path}: {error!r}") from error

    async def want(self, status: int, method: str, path: str, content: object = None) -> Any:
        """Return the JSON of an answer that must have `status`. Raises: HubAnswer, OSError."""
        got, body = await self.ask(method, path, content)
        if got != status:
            raise HubAnswer(got, body, request=f"{method} {path}")
        return json.loads(body) if body else {}

    async def open(self, env: str, item_id: str, *, seed: int = 0) -> tuple[str, str]:
        """Return session id and first observation of a new session of a hub."""
        content = {"env": env, "item_id": item_id, "seed": seed}
        answer = await self.want(201, "POST", "/v1/sessions", content)
        return answer["session_id"], answer["observation"]

    async def step(self, session_id: str, action: str, seq: int) -> dict[str, Any]:
        """Return the answer to step `seq` of a session of a hub."""
        path = f"/v1/sessions/{session_id}/step"
        return await self.want(200, "POST", path, {"action": action, "seq": seq})

    async def hint(self, session_id: str) -> dict[str, Any]:
        """Return the valid actions and the expert's action."""
        return await self.want(200, "GET", f"/v1/sessions/{session_id}/hint")

    async def delete(self, session_id: str) -> None:
        await self.want(204, "DELETE", f"/v1/sessions/{session_id}")


START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceProcess:
    """A running service: its target and its process."""

    target: ServiceTarget
    process: ChildProcess

    def rss_bytes(self) -> int:
        """Return the resident memory of the process, without its children."""
        return psutil.Process(self.process.pid).memory_info().rss

    def worker_rss_bytes(self) -> int:
        """Return the resident memory of all its descendants."""
        return resident_bytes([self.process.pid])[self.process.pid] - self.rss_bytes()


@contextlib.contextmanager
def hub_process(
    envs: Sequence[str], *, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> Generator[ServiceProcess]:
    """Yield a hub that serves `envs`, started by `python run.py envhub`.

    Args:
        overrides: further settings, such as `envhub.session_idle_s=5`.
        environ: environment variables to add.

    Raises: ChildFailed: it did not start, or did not stop after SIGTERM.
    """
    token = secrets.token_urlsafe(16)
    argv = ["run.py", "envhub", f"envhub.envs={json.dumps(list(envs))}", f"token={token}"]
    with _running([*argv, "log.level=WARNING", *overrides], environ) as process:
        process.wait_until(lambda: _said_address(process) != "", timeout_s=START_TIMEOUT_S)
        target = ServiceTarget(url=_said_address(process), token=token)
        process.wait_until(lambda: _accepts(target), timeout_s=START_TIMEOUT_S)
        yield ServiceProcess(target=target, process=process)


def _said_address(process: ChildProcess) -> str:
    """Return the address that a hub has printed on its standard output, "" before that."""
    found = [line for line in process.log_tail(max_lines=100) if line.startswith("hub: ")]
    return found[0].split()[1] if found else ""


@contextlib.contextmanager
def _running(argv: list[str], environ: Mapping[str, str] | None) -> Generator[ChildProcess]:
    """Yield a service once it accepts requests; end it afterwards."""
    env = {"OMP_NUM_THREADS": "1", **(environ or {})}
    with tempfile.TemporaryDirectory(prefix="longstride-bench-") as folder:
        log_path = Path(folder) / "log.txt"
        argv = [sys.executable, *argv]
        child = ChildProcess("service", argv, log_path=log_path, env=env, cwd=ROOT)
        try:
            yield child
        finally:
            _stop(child)


def _stop(child: ChildProcess) -> None:
    """Stop a service, which must stop its own children.

    Raises: ChildFailed: some process did not end within the limit.
    """
    offspring: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        offspring = psutil.Process(child.pid).children(recursive=True)
    child.terminate()
    has_ended = wait_until_ended([child], deadline=time.monotonic() + STOP_TIMEOUT_S)
    _, left = psutil.wait_procs(offspring, timeout=STOP_TIMEOUT_S)
    child.clear_away()
    if left or not has_ended:
        raise ChildFailed(f"not stopped within {STOP_TIMEOUT_S:g} s, left {len(left)} children")


def _accepts(target: ServiceTarget) -> bool:
    """Return whether a service accepts requests."""
    try:
        with socket.create_connection(target.address, timeout=1.0) as connection:
            connection.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            return connection.recv(16).startswith(b"HTTP/1.")
    except OSError:
        return False
