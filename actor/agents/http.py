"""HTTP/1.1 server for agents. The requests of a connection are answered in order.

It has no framework between parser and handler, because an agent sends two requests a turn.
"""

import asyncio
import re
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, cast

import httptools

from actor.agents.delivered import has_unread_bytes
from actor.agents.strangers import Stranger, Strangers
from actor.api.requests import ApiError
from common.formats.action_size import DEFAULT_ACTION_MIB, FIELDS_BYTES, MIB

MAX_BODY_BYTES = DEFAULT_ACTION_MIB * MIB + FIELDS_BYTES
MAX_HEAD_BYTES = 64 * 1024
BODY_S = 30.0  # Seconds for a complete request to arrive.
MAX_WAITING = 64  # Maximum number of pipelined requests of a connection that wait for an answer.
# A reset within these seconds of an answer means that the client has not read it.
RESET_S = 5.0
JSON = "application/json"
EVENTS = "text/event-stream"
# JSON contains no line break of this form, so only a header matches.
UPGRADE = re.compile(rb"\r\n[Uu]pgrade:")
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
EPISODE = re.compile(rb"/episode/([^/?]+)(/[^?]*)")  # A path that names its episode.


@dataclass(slots=True, eq=False)
class AgentRequest:
    """A request that has arrived completely, or the error to answer it with."""

    transport: asyncio.Transport
    url: bytes = b""
    method: str = ""
    api_key: str = ""  # Value of the header x-api-key.
    bearer: str = ""
    idempotency_key: str = ""  # Value of the header idempotency-key.
    is_retry: bool = False  # The client's package has marked the request as a retry.
    body: bytearray = field(default_factory=bytearray)
    refusal: ApiError | None = None
    is_last: bool = False  # The last request of its connection.
    is_lost: bool = False  # The connection broke before the client had read the answer.

    @property
    def path(self) -> str:
        """Path of the URL, without the episode and the query."""
        found = EPISODE.match(self.url)
        path = found[2] if found else self.url.partition(b"?")[0]
        return path.decode("latin-1")

    @property
    def episode(self) -> str:
        """Episode that the URL names, as in `url_name`; "" for none."""
        found = EPISODE.match(self.url)
        return found[1].decode("latin-1") if found else ""

    @property
    def key(self) -> str:
        """Key of the episode that the request belongs to."""
        return self.api_key or self.bearer

    @property
    def peer(self) -> str:
        """Address of the client."""
        place: object = self.transport.get_extra_info("peername")
        return str(cast(tuple[object, ...], place)[0]) if isinstance(place, tuple) else "unknown"

    @property
    def is_there(self) -> bool:
        """Whether the client still waits for the answer."""
        return not self.transport.is_closing()

    def refuse(self, status: int, code: str, text: str) -> None:
        """Record an error. The first error of a request is its answer."""
        self.refusal = self.refusal or ApiError(status, code, text)


def response(content: str = "", *, status: int = 200, kind: str = JSON) -> bytes:
    """Return the bytes of a complete response."""
    sent = content.encode()
    line = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
    length = "" if status == HTTPStatus.NO_CONTENT else f"content-length: {len(sent)}\r\n"
    return f"{line}content-type: {kind}\r\n{length}\r\n".encode() + sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Answering:
    """The handlers that all connections share."""

    answer: Callable[[AgentRequest], Coroutine[None, None, bytes]]
    # Returns the answer to a request whose handler raised.
    failed: Callable[[AgentRequest, BaseException], bytes]
    # Raises ApiError for a request whose body is not read, because its key is invalid.
    admit: Callable[[AgentRequest], object] | None = None
    strangers: Strangers = field(default_factory=Strangers)
    connections: set["AgentConnection"] = field(default_factory=set["AgentConnection"])


class AgentConnection(asyncio.Protocol):
    """One agent's connection. An invalid request is answered with an error, never ignored."""

    def __init__(self, answering: Answering, stranger: Stranger | None = None) -> None:
        """`stranger`: the connection, if it has counted as one before; None: it is new."""
        self._answering = answering
        self._stranger = stranger
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._request: AgentRequest | None = None  # The request that is arriving.
        self._timer: asyncio.TimerHandle | None = None  # Timeout of the arriving request.
        self._num_head = 0  # Bytes of its head so far; -1 once the head is complete.
        self._waiting: deque[AgentRequest] = (
            deque()
        )  # Requests to answer. The first one is in progress.
        self._task: asyncio.Task[bytes] | None = None
        self._answered_last: AgentRequest | None = None  # No further request has begun since.
        self._answered_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._answering.connections.add(self)
        if self._stranger is None:
            self._stranger = self._answering.strangers.add(
                self._transport.get_extra_info("peername"), self._descriptor, self._transport.abort
            )

    def _descriptor(self) -> int:
        """Return the descriptor of the connection, -1 once it is closed."""
        place: Any = self._transport.get_extra_info("socket")
        return -1 if place is None or self._transport.is_closing() else place.fileno()

    def eof_received(self) -> None:
        """Record whether the client has left without reading the last answer."""
        last = self._answered_last
        if last is not None and has_unread_bytes(self._transport):
            last.is_lost = True

    def connection_lost(self, exc: Exception | None) -> None:
        self._answering.connections.discard(self)
        self._forget_stranger()
        for each in self._waiting:
            each.is_lost = True
        last = self._answered_last
        is_fresh = self._loop.time() - self._answered_at < RESET_S
        if last is not None and exc is not None and is_fresh:
            last.is_lost = True
        self._end(400, "incomplete_body", "the request body is incomplete")

    def _forget_stranger(self) -> None:
        if self._stranger is not None:
            self._stranger.forget()

    def close(self) -> None:
        """Close the connection and cancel the answer in progress."""
        if self._task is not None:
            self._task.cancel()
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes. Invalid HTTP is answered with a 400."""
        if self._stranger is not None:
            self._stranger.note_bytes()
        # On an upgrade header (to HTTP/2, for example) the parser would skip the body.
        if b"pgrade:" in data:
            data = UPGRADE.sub(b"\r\nx-grade:", data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.on_message_begin()
            self._end(400, "invalid_request", f"the request is not valid HTTP: {error}")
        if self._request is None:
            return
        self._num_head += len(data) if self._num_head >= 0 else 0
        if self._num_head > MAX_HEAD_BYTES:
            text = f"the request head has more than {MAX_HEAD_BYTES} bytes"
            self._end(431, "request_header_fields_too_large", text)
        elif self._timer is None:
            text = f"the request body did not arrive within {BODY_S:g} s"
            self._timer = self._loop.call_later(BODY_S, self._end, 408, "request_timeout", text)

    def _end(self, status: int, code: str, text: str) -> None:
        """Answer an incomplete request with an error, and accept no further requests."""
        if self._request is not None:
            self._request.refuse(status, code, text)
            self._request.is_last = True
            self._queue_request(self._request)

    def on_message_begin(self) -> None:
        """Begin a request. The parser calls this method and the ones below."""
        self._request = AgentRequest(self._transport)
        self._num_head = 0
        self._answered_last = None  # A client sends its next request after it has read the answer.

    def on_url(self, url: bytes) -> None:
        """Append a part of the URL."""
        if self._request is not None:
            self._request.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store the headers that are used."""
        name = name.lower()
        request = self._request
        if request is None:
            return
        if name == b"authorization":
            scheme, _, key = value.decode("latin-1").partition(" ")
            request.bearer = key.strip() if scheme.lower() == "bearer" else ""
        elif name == b"x-api-key":
            request.api_key = value.decode("latin-1").strip()
        elif name == b"idempotency-key":
            request.idempotency_key = value.decode("latin-1").strip()
        elif name == b"x-stainless-retry-count":  # The packages of OpenAI and Anthropic send it.
            request.is_retry = value.strip() not in (b"", b"0")
        elif name == b"expect" and value.lower() == b"100-continue" and not self._waiting:
            self._transport.write(CONTINUE)

    def on_headers_complete(self) -> None:
        """Stop counting the bytes of the head, and check the key."""
        self._num_head = -1
        request = self._request
        if request is None:
            return
        request.method = self._parser.get_method().decode("latin-1")
        if self._answering.admit is None or request.refusal is not None:
            return
        try:
            self._answering.admit(request)
            self._forget_stranger()
        except ApiError as error:
            request.refusal = error

    def on_body(self, body: bytes) -> None:
        """Append a part of the body. A body over the limit is discarded."""
        request = self._request
        if request is None or request.refusal is not None:
            return
        request.body += body
        if len(request.body) > MAX_BODY_BYTES:
            request.body.clear()
            text = f"the request body has more than {MAX_BODY_BYTES} bytes"
            request.refuse(413, "request_entity_too_large", text)

    def on_message_complete(self) -> None:
        """Queue the request behind earlier ones of this connection."""
        if self._request is not None:
            is_old = self._parser.get_http_version() != "1.1" or self._request.method == "HEAD"
            self._request.is_last = is_old or not self._parser.should_keep_alive()
            self._queue_request(self._request)

    def _queue_request(self, request: AgentRequest) -> None:
        """Queue a complete request. Close the connection if too many requests wait."""
        self._request = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting and self._waiting[-1].is_last:
            return
        self._waiting.append(request)
        if self._task is None:
            self._begin()
        elif len(self._waiting) > MAX_WAITING:
            self._transport.abort()

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._answering.answer(self._waiting[0]))
        self._task.add_done_callback(self._send_answer)

    def _send_answer(self, task: asyncio.Task[bytes]) -> None:
        """Send the answer of a finished task, and begin the next request."""
        request = self._waiting.popleft()
        self._task = None
        if task.cancelled():
            return
        failure = task.exception()
        response = task.result() if failure is None else self._answering.failed(request, failure)
        if self._transport.is_closing():
            self._waiting.clear()
            return
        if request.is_last:
            response = response.replace(b"\r\n", b"\r\nconnection: close\r\n", 1)
        self._transport.write(response)
        self._answered_last = request
        self._answered_at = self._loop.time()
        if request.is_last:
            self._transport.close()
        elif self._waiting:
            self._begin()
