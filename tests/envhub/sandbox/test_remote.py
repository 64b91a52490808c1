"""Laws of remote sandboxes: the reference server with bubblewrap, over real HTTP."""

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import psutil
import pytest
import uvicorn

from common.config.envs import SandboxOptions
from common.http import serving as limits
from common.repository import ROOT
from envhub.sandbox.bubblewrap import Bubblewrap
from envhub.sandbox.interface import (
    CommandEnd,
    RefusedBySandbox,
    Sandbox,
    SandboxFailed,
    SandboxRequest,
)
from envhub.sandbox.remote import RemoteSandbox, RemoteSandboxes
from envhub.sandbox.serve import SandboxTable, server_config
from tests.envhub.sandbox.boxes import LIMITS, OPTIONS, SLEEPER, need_bubblewrap, shell

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TOKEN = "a-token"


@contextmanager
def serving(*, idle_s: float = 600.0, capacity: int = 4) -> Iterator[tuple[str, SandboxTable]]:
    """Yield the URL of a server in a thread, and its table."""
    table = SandboxTable(Bubblewrap(OPTIONS), LIMITS, idle_s=idle_s, capacity=capacity)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(server_config(table, TOKEN))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", table
        server.should_exit = True
        thread.join()


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    need_bubblewrap()
    monkeypatch.setenv("SANDBOX_TOKEN", TOKEN)
    with serving() as (address, _):
        yield address


def at(url: str, work: Callable[[Sandbox], Awaitable[Any]]) -> Any:
    """Return the result of work in a new sandbox of a server."""

    async def perform() -> Any:
        backend = RemoteSandboxes(SandboxOptions(backend="remote", url=url))
        sandbox = await backend.create(SandboxRequest(limits=LIMITS, folder="/work"))
        try:
            return await work(sandbox)
        finally:
            await sandbox.delete()  # It has no effect on a deleted sandbox.

    return asyncio.run(perform())


def test_remote_sandbox_has_the_interface_of_a_local_one(url: str) -> None:
    async def work(sandbox: Sandbox) -> None:
        content = bytes(range(256)) * 100
        await sandbox.write("/work/a b", content, mode=0o600)
        assert await sandbox.read("/work/a b", max_bytes=1 << 20) == content
        result = await shell(
            sandbox, "pwd; stat -c %a 'a b'; echo $X; exit 3", variables={"X": "y"}
        )
        assert (result.text, result.exit_code) == ("/work\n600\ny\n", 3)
        await shell(sandbox, SLEEPER, keeps_processes=True)
        await sandbox.kill()
        assert (await shell(sandbox, "pgrep -c sleep")).text == "0\n"
        late = await shell(sandbox, "sleep 600", timeout_s=0.5)
        assert late.ended_by is CommandEnd.TIMEOUT
        with pytest.raises(RefusedBySandbox, match="lost: No such file"):
            await sandbox.read("/work/lost", max_bytes=10)

    at(url, work)


def test_deleted_sandbox_is_gone_at_the_server(url: str) -> None:
    async def work(sandbox: Sandbox) -> None:
        await shell(sandbox, f"setsid {SLEEPER}", keeps_processes=True)
        inside = [p for p in psutil.Process().children(recursive=True) if p.name() == "sleep"]
        assert inside
        await sandbox.delete()
        _, alive = psutil.wait_procs(inside, timeout=60)
        assert alive == []

    at(url, work)


def test_wrong_token_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_TOKEN", "another")
    with pytest.raises(SandboxFailed, match="status 401"):
        at(url, lambda sandbox: shell(sandbox, "true"))


def test_server_bounds_sandboxes_and_requests(url: str) -> None:
    async def work() -> list[int]:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        found: list[int] = []
        async with aiohttp.ClientSession(headers=headers) as http:

            async def ask(method: str, path: str, **options: Any) -> int:
                async with http.request(method, f"{url}/v1/sandboxes{path}", **options) as answer:
                    return answer.status

            found.append(await ask("POST", "", json={"limits": {"cpus": 1}}))
            found.append(await ask("POST", "", json={"folder": "../x"}))
            found.append(await ask("POST", "/none/exec", json={"argv": ["ls"], "timeout_s": 1}))
            found.append(await ask("GET", "/none/file", params={"path": "/x"}))
            found.append(await ask("DELETE", "/none"))
            created = [await ask("POST", "", json={}) for _ in range(5)]
        return found + created

    assert asyncio.run(work()) == [400, 422, 404, 404, 200, 201, 201, 201, 201, 429]


@pytest.mark.parametrize(
    ("folder", "status"),
    [
        ("/app/../../x", 201),  # The work folder is /x of the sandbox.
        ("/app/../../usr/x", 422),
        ("//usr/x", 422),
        ("/", 422),
        ("/app/..", 422),
        ("/a\n", 422),
        ("x", 422),
    ],
)
def test_work_folder_stays_in_the_sandbox(url: str, folder: str, status: int) -> None:
    async def work() -> int:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.post(f"{url}/v1/sandboxes", json={"folder": folder}) as answer,
        ):
            return answer.status

    name = Path("/", folder.strip("/").rpartition("/")[2])
    is_there = name.exists()
    assert asyncio.run(work()) == status
    assert name.exists() == is_there


@pytest.mark.parametrize("image", ["--privileged", "-v/:/host", "a b", "a\n"])
def test_image_is_no_option_of_the_container_program(url: str, image: str) -> None:
    async def work() -> int:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.post(f"{url}/v1/sandboxes", json={"image": image}) as answer,
        ):
            return answer.status

    assert asyncio.run(work()) == 422


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /v1/sandboxes HTTP/1.1\r\nhost: a\r\n",
        b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n",
        b"POST /v1/sandboxes HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n{",
    ],
)
def test_flood_without_a_token_shuts_no_client_out(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    need_bubblewrap()
    monkeypatch.setattr(limits, "MAX_CONNECTIONS", 100)
    monkeypatch.setenv("SANDBOX_TOKEN", TOKEN)
    with serving() as (address, _), contextlib.ExitStack() as flood:
        place = (urlsplit(address).hostname, urlsplit(address).port)

        async def work(sandbox: Sandbox) -> list[str]:
            texts: list[str] = []
            for _ in range(3):  # The client's connection is open while the others come.
                for _ in range(150):
                    stranger = flood.enter_context(socket.create_connection(place, timeout=60))
                    with contextlib.suppress(ConnectionError):
                        stranger.sendall(sent)
                texts.append((await shell(sandbox, "echo served")).text)
            return texts

        assert at(address, work) == ["served\n"] * 3
        assert at(address, work) == ["served\n"] * 3  # A client that comes during the flood.


def test_unused_sandbox_ends_after_its_idle_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    need_bubblewrap()
    monkeypatch.setenv("SANDBOX_TOKEN", TOKEN)
    with serving(idle_s=0.5) as (address, _):

        async def work(sandbox: Sandbox) -> None:
            result = await shell(sandbox, "sleep 2; echo used")  # A running command keeps it.
            assert result.text == "used\n"
            inside = [p for p in psutil.Process().children() if "bwrap" in p.name()]
            _, alive = await asyncio.to_thread(psutil.wait_procs, inside, timeout=60)
            assert alive == []
            with pytest.raises(SandboxFailed, match="status 404"):
                await shell(sandbox, "true")

        at(address, work)


def test_unreachable_server_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    options = SandboxOptions(backend="remote", url=f"http://127.0.0.1:{port}")
    problem = RemoteSandboxes(options).problem()
    assert f"sandbox server http://127.0.0.1:{port}" in problem
    assert "envhub.sandbox.serve" in problem


def test_server_starts_from_the_command_line() -> None:
    need_bubblewrap()
    argv = [sys.executable, "-m", "envhub.sandbox.serve", "--port", "0", "--memory-mib", "64"]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, encoding="utf-8") as process:
        assert process.stdout is not None
        address = process.stdout.readline().removeprefix("sandboxes: ").strip()
        assert RemoteSandboxes(SandboxOptions(backend="remote", url=address)).problem() == ""
        process.terminate()
    refused = subprocess.run(
        [*argv, "--host", "0.0.0.0", "--token-env", "NO_SUCH_TOKEN"],
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert "needs a token in the variable NO_SUCH_TOKEN" in refused.stderr


def test_cancelled_deletion_closes_the_connections() -> None:
    async def cancelled() -> bool:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            session = aiohttp.ClientSession()
            url = f"http://127.0.0.1:{silent.getsockname()[1]}"
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await RemoteSandbox(session, url, "1", "/work").delete()
            return session.closed

    assert asyncio.run(cancelled())
