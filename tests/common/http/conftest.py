"""A real HTTP proxy and a real server, each on a port of this machine."""

import base64
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

CLOSED = "http://127.0.0.1:9"  # no process listens at the discard port
NAMES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


class Served(ThreadingHTTPServer):
    """Answers each request, and notes it as (method, target, login of the proxy)."""

    def __init__(self, *, status: int = 200) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = status
        self.asked: list[tuple[str, str, str]] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Served

    def _answer(self) -> None:
        kind, _, coded = self.headers.get("Proxy-Authorization", "").partition(" ")
        login = base64.b64decode(coded).decode() if kind == "Basic" else ""
        self.server.asked.append((self.command, self.path, login))
        self.send_response(self.server.status)
        self.send_header("Content-Length", "4")
        self.end_headers()
        self.wfile.write(b"here")

    do_GET = do_POST = do_CONNECT = _answer

    def log_message(self, *args: object) -> None: ...


@contextmanager
def serving(*, status: int = 200) -> Iterator[Served]:
    server = Served(status=status)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(60.0)


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def server() -> Generator[Served]:
    with serving() as one:
        yield one


@pytest.fixture
def closed_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """All variables name a proxy at which no process listens."""
    for name in NAMES[:3]:
        monkeypatch.setenv(name, CLOSED)
        monkeypatch.setenv(name.upper(), CLOSED)
