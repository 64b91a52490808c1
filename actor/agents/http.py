"""HTTP of the agents' endpoint: uvicorn's connections, with bounds and a record of lost answers."""

import asyncio
import re
import socket
import ssl
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from actor.agents.listener import BACKLOG
from actor.agents.strangers import Stranger, Strangers, TlsServer, has_unread_bytes
from actor.api.listening import stop_accepting
from actor.api.requests import ApiError
from common.formats.action_size import DEFAULT_ACTION_MIB, FIELDS_BYTES, MIB

MAX_BODY_BYTES = DEFAULT_ACTION_MIB * MIB + FIELDS_BYTES
MAX_HEAD_BYTES = 64 * 1024
BODY_S = 30.0  # Seconds for a complete request to arrive.
MAX_WAITING = 64  # Maximum number of pipelined requests of a connection that wait for an answer.
# A reset within these seconds of an answer means that the client has not read it.
RESET_S = 5.0
IDLE_S = 7 * 86_400  # Seconds without a request after which a connection is closed.
CLOSE_S = 1.0
# JSON contains no line break of this form, so only a header matches.
UPGRADE = re.compile(rb"\r\n[Uu]pgrade:")
EPISODE = re.compile(r"/episode/([^/]+)(/.*)")  # A path that names its episode.


class AgentRequest(Request):
    """A request of an agent. The connection that it came by records whether its answer is lost."""

    content = b""  # The whole body, once it has arrived.

    @property
    def path(self) -> str:
        """Path of the URL, without the episode."""
        path = self.scope["raw_path"].decode("latin-1")
        named = EPISODE.fullmatch(path)
        return named[2] if named else path

    @property
    def episode(self) -> str:
        """Episode that the URL names, as in `url_name`; "" for none."""
        named = EPISODE.fullmatch(self.scope["raw_path"].decode("latin-1"))
        return named[1] if named else ""

    @property
    def key(self) -> str:
        """Key of the episode that the request belongs to."""
        if key := self.headers.get("x-api-key", "").strip():
            return key
        scheme, _, key = self.headers.get("authorization", "").partition(" ")
        return key.strip() if scheme.lower() == "bearer" else ""

    @property
    def idempotency_key(self) -> str:
        return self.headers.get("idempotency-key", "").strip()

    @property
    def is_retry(self) -> bool:
        """Whether the client's package (of OpenAI or Anthropic) marks the request as a retry."""
        return self.headers.get("x-stainless-retry-count", "").strip() not in ("", "0")

    @property
    def peer(self) -> str:
        """Address of the client."""
        return self.client.host if self.client else "unknown"

    @property
    def is_lost(self) -> bool:
        """Whether the connection broke before the client had read the answer."""
        return "is_lost" in self.scope["state"]

    @property
    def is_there(self) -> bool:
        """Whether the client still waits for the answer."""
        return not self.scope["state"]["transport"].is_closing()

    async def read(self, *, is_refused: bool) -> None:
        """Read the body. The body of a refused request is discarded. Raises: ApiError."""
        content = bytearray()
        num_bytes = 0
        try:
            async for chunk in self.stream():
                num_bytes += len(chunk)
                if is_refused or num_bytes > MAX_BODY_BYTES:
                    content.clear()
                else:
                    content += chunk
        except ClientDisconnect as error:
            raise ApiError(400, "incomplete_body", "the request body is incomplete") from error
        if num_bytes > MAX_BODY_BYTES and not is_refused:
            text = f"the request body has more than {MAX_BODY_BYTES} bytes"
            raise ApiError(413, "request_entity_too_large", text)
        self.content = bytes(content)


class AgentConnection(HttpToolsProtocol):
    """One agent's connection. An invalid request is answered with an error, never ignored."""

    def __init__(self, server: "HttpServer", stranger: Stranger | None = None) -> None:
        """`stranger`: the connection, if it has counted as one before; None: it is new."""
        super().__init__(server.config, server.state, {})
        self._server = server
        self.stranger = stranger
        self._timer: asyncio.TimerHandle | None = None  # Timeout of the arriving request.
        self._num_head = 0  # Bytes of its head so far; -1 once the head is complete.
        self._marks: dict[str, Any] = {}  # Marks of the arriving request, its `scope["state"]`.
        # Marks of the requests without a complete answer. The first one is in progress.
        self._waiting: deque[dict[str, Any]] = deque()
        self._answered: dict[str, Any] = {}  # Marks of the last answered request.
        self._answered_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        if self.stranger is None:
            peer = transport.get_extra_info("peername")
            self.stranger = self._server.strangers.add(peer, self._descriptor, self.transport.abort)

    def _descriptor(self) -> int:
        """Return the descriptor of the connection, -1 once it is closed."""
        place: Any = self.transport.get_extra_info("socket")
        return -1 if place is None or self.transport.is_closing() else place.fileno()

    def eof_received(self) -> None:
        """Record whether the client has left without reading the last answer."""
        if has_unread_bytes(self.transport):
            self._answered["is_lost"] = True

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self.stranger is not None:
            self.stranger.forget()
        if exc is not None and self.loop.time() - self._answered_at < RESET_S:
            self._answered["is_lost"] = True
        for marks in self._waiting:
            marks["is_lost"] = True
        super().connection_lost(exc)

    def close(self) -> None:
        """Close the connection. A request in progress gets no answer."""
        if self.cycle is not None:
            self.cycle.disconnected = True
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes."""
        if self.stranger is not None:
            self.stranger.note_bytes()
        # On an upgrade header (to HTTP/2, for example) the parser would skip the body.
        if b"pgrade:" in data:
            data = UPGRADE.sub(b"\r\nx-grade:", data)
        super().data_received(data)
        if self._timer is not None and self._num_head >= 0:
            self._num_head += len(data)
            if self._num_head > MAX_HEAD_BYTES:
                text = f"the request head has more than {MAX_HEAD_BYTES} bytes"
                self._refuse(431, "request_header_fields_too_large", text)

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no HTTP."""
        if self._timer is None:
            self.on_message_begin()
        self._refuse(400, "invalid_request", f"the request is not valid HTTP: {msg}")

    def _refuse_slow(self) -> None:
        text = f"the request body did not arrive within {BODY_S:g} s"
        self._refuse(408, "request_timeout", text)

    def _refuse(self, status: int, code: str, text: str) -> None:
        """Answer a request that has not arrived with an error, and close the connection."""
        self._stop_timer()
        if self.transport.is_closing() or "is_refused" in self._marks:
            return
        self._marks["is_refused"] = True
        scope = {"method": "", **self.scope, "raw_path": self.url.partition(b"?")[0]}
        error = ApiError(status, code, text)
        answer = self._server.failed(AgentRequest(scope), error)
        head = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}".encode(), b"connection: close"]
        head += [b": ".join(field) for field in answer.raw_headers]
        self.transport.write(b"\r\n".join([*head, b"", bytes(answer.body)]))
        self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def on_message_begin(self) -> None:
        """Begin a request. The parser calls this method and the ones below."""
        super().on_message_begin()
        self._marks = {"transport": self.transport}
        self.scope["state"] = self._marks
        self._num_head = 0
        self._answered = {}  # A client sends its next request after it has read the answer.
        self._stop_timer()
        self._timer = self.loop.call_later(BODY_S, self._refuse_slow)

    def on_headers_complete(self) -> None:
        """Check the key, and queue the request behind earlier ones of this connection."""
        self._num_head = -1
        super().on_headers_complete()
        self._waiting.append(self._marks)
        try:
            if self._server.admit is not None:
                self._server.admit(AgentRequest(cast(Scope, self.scope)))
                if self.stranger is not None:
                    self.stranger.forget()
        except ApiError as error:
            self._marks["refusal"] = error
        if len(self.pipeline) > MAX_WAITING:
            self.transport.abort()

    def on_message_complete(self) -> None:
        self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Record which request was answered last."""
        self._answered = self._waiting.popleft()
        self._answered_at = self.loop.time()
        super().on_response_complete()


class HttpServer:
    """Receives requests, and answers those of one connection in order."""

    def __init__(
        self,
        answer: Callable[[AgentRequest], Awaitable[Response]],
        failed: Callable[[AgentRequest, BaseException], Response],
        *,
        admit: Callable[[AgentRequest], object] | None = None,
        strangers: Strangers | None = None,
    ) -> None:
        """Create the server; `start` opens it.

        Args:
            failed: returns the answer to a request whose handler raised.
            admit: raises ApiError for a request whose body is not read: its key is invalid.
            strangers: the connections without a valid key; None: they are not bounded.
        """
        self.failed = failed
        self.admit = admit
        self.strangers = strangers or Strangers()
        self.state = ServerState()
        self.config = uvicorn.Config(
            self._handle,
            interface="asgi3",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            timeout_keep_alive=IDLE_S,
        )
        self._answer = answer
        self._listening: asyncio.Server | None = None
        self._encrypting: TlsServer | None = None

    async def start(self, listener: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Accept connections at a listening socket."""
        # An answer has two writes. Connections inherit the option; asyncio does not set it for a
        # socket without a protocol number, and the second write would wait 40 ms for the client.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        make = partial(AgentConnection, self)
        if tls is not None:
            self._encrypting = TlsServer(listener, tls, self.strangers, make)
        else:
            self._listening = await asyncio.get_running_loop().create_server(
                make, sock=listener, backlog=BACKLOG
            )

    async def close(self) -> None:
        """Stop listening. Pending requests get no answer."""
        if self._encrypting is not None:
            await self._encrypting.close()
        if self._listening is not None:
            await stop_accepting(connection.fileno() for connection in self._listening.sockets)
            self._listening.close()
        await asyncio.sleep(0)  # New connections call `connection_made`.
        for connection in list(self.state.connections):
            cast(AgentConnection, connection).close()
        tasks = list(self.state.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listening is not None:
            async with asyncio.timeout(CLOSE_S):
                await self._listening.wait_closed()

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, as an ASGI application."""
        request = AgentRequest(scope, receive)
        with suppress(asyncio.CancelledError):  # The server is closing.
            try:
                refusal: ApiError | None = scope["state"].get("refusal")
                await request.read(is_refused=refusal is not None)
                if refusal is not None:
                    raise refusal
                answer = await self._answer(request)
            except Exception as error:  # noqa: BLE001 - every failure has an answer
                if "is_refused" in scope["state"]:
                    return
                answer = self.failed(request, error)
            await answer(scope, receive, send)
