"""Laws of the client of an external retrieval server: whatever goes wrong there is a failure."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from envhub.env import EnvFailure
from envhub.envs.searchqa.library import RemoteRetriever, parse_url, read_reply
from envhub.envs.searchqa.passages import Passage
from tests.ports import free_port

DOCUMENT = {"id": "7", "contents": '"Apple"\napple pie'}


class Server(ThreadingHTTPServer):
    """Gives every request a fixed answer and records the requests."""

    daemon_threads = True

    def __init__(self, status: int, body: bytes, missing_bytes: int, hold: threading.Event) -> None:
        self.status, self.body, self.missing_bytes, self.hold = status, body, missing_bytes, hold
        self.asked: list[tuple[str, Any]] = []
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    """Speaks for `Server`."""

    server: Server

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, asked))
        self.server.hold.wait(5.0)
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(self.server.body) + self.server.missing_bytes))
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


Serve = Callable[..., tuple[str, Server]]


@pytest.fixture
def serve() -> Iterator[Serve]:
    running: list[tuple[Server, threading.Thread]] = []

    def start(
        body: object, *, status: int = 200, missing_bytes: int = 0, is_silent: bool = False
    ) -> tuple[str, Server]:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        hold = threading.Event()
        if not is_silent:
            hold.set()
        server = Server(status, content, missing_bytes, hold)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        running.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}", server

    yield start
    for server, thread in running:
        server.hold.set()
        server.shutdown()
        server.server_close()
        thread.join(60.0)


def search(url: str, timeout_s: float = 60.0) -> list[Passage]:
    return RemoteRetriever(url, timeout_s=timeout_s).search("apple", 2)


@pytest.mark.parametrize("one", [{"document": DOCUMENT, "score": 0.5}, DOCUMENT])
def test_search_follows_the_protocol(serve: Serve, one: dict[str, object]) -> None:
    url, server = serve({"result": [[one, one, one]]})
    assert search(url) == [Passage('"Apple"', "apple pie")] * 2
    asked = {"queries": ["apple"], "topk": 2, "return_scores": True}
    assert server.asked == [("/retrieve", asked)]


def test_path_of_the_url_is_kept(serve: Serve) -> None:
    url, server = serve({"result": [[]]})
    assert search(url + "/v2/find") == []
    assert server.asked[0][0] == "/v2/find"


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ({"detail": "boom"}, 500, "status 500"),
        ({"detail": "gone"}, 302, "status 302"),
        (b"<html>", 200, "Expecting value"),
        ({"result": []}, 200, "one list for one query"),
        ({"error": "index"}, 200, "one list for one query"),
        ({"result": [[{"id": 1}]]}, 200, "a passage must have"),
        ({"result": [["text"]]}, 200, "a passage must have"),
        (b"", 200, "Expecting value"),
    ],
)
def test_wrong_answer_raises_an_error_that_names_the_server(
    serve: Serve, body: object, status: int, reason: str
) -> None:
    url, _ = serve(body, status=status)
    with pytest.raises(EnvFailure, match=f"retrieval server {url}/retrieve: .*{reason}"):
        search(url)


def test_answer_that_breaks_off_is_a_failure(serve: Serve) -> None:
    url, server = serve({"result": [[]]}, missing_bytes=5)
    with pytest.raises(EnvFailure):
        search(url)
    assert len(server.asked) == 1


def test_silence_is_a_failure_at_the_deadline(serve: Serve) -> None:
    url, _ = serve({"result": [[]]}, is_silent=True)
    with pytest.raises(EnvFailure, match="timed out"):
        search(url, timeout_s=0.1)


def test_refused_connection_is_a_failure() -> None:
    with pytest.raises(EnvFailure, match="refused"):
        search(f"http://127.0.0.1:{free_port()}")


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://a/b", "localhost:80", "http://", ""])
def test_url_must_be_http(url: str) -> None:
    with pytest.raises(ValueError, match="http://HOST:PORT"):
        parse_url(url)


def test_reply_may_hold_bare_documents() -> None:
    reply = json.dumps({"result": [[{"title": "Pear", "text": "tart"}]]}).encode()
    assert read_reply(reply) == [Passage("Pear", "tart")]
