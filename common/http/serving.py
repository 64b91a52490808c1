"""HTTP servers: limits before authentication (header size, time, number), counts of refusals."""

import asyncio
import base64
import hmac
import logging
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from common.wire.access.connections import RESERVED_FILES, raise_file_limit


class EmbeddedServer(uvicorn.Server):
    """A server that does not install signal handlers."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


MAX_ADDRESSES = 1_000  # Addresses with counts of their own; later ones are counted as "others".
MAX_SHOWN = 50
REFUSED = {
    400: "malformed",
    401: "token",
    403: "origin",
    413: "too_large",
    422: "invalid",
}  # Reasons by HTTP status.


class Refusals:
    """Requests and connections that a hub refused, by address and reason."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = {}

    def note(self, client: tuple[str, int] | None, reason: str) -> None:
        """Count one refusal of a client, by the address that uvicorn reports."""
        address = client[0] if client else "unknown"
        if len(self._counts) >= MAX_ADDRESSES and address not in self._counts:
            address = "others"
        self._counts.setdefault(address, Counter())[reason] += 1

    def report(self) -> dict[str, int]:
        """Return the most frequent refusals by "address/reason", with their counts."""
        counts = Counter(
            {f"{a}/{r}": n for a, c in self._counts.copy().items() for r, n in c.items()}
        )
        return dict(counts.most_common(MAX_SHOWN))


MAX_HEADER_BYTES = 64 * 1024  # Maximum bytes of a request's head with its path.
REQUEST_S = 20.0  # Deadline for a complete request, from its first byte or from the connection.
# The descriptor limit may reduce this number. A further connection closes the oldest unused one.
MAX_CONNECTIONS = 20_000
TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)


class LimitedProtocol(HttpToolsProtocol):
    """Closes connections with oversized headers, slow requests, or no requests."""

    counts: Counter[str]
    refusals: Refusals
    max_connections: int
    token: bytes  # A connection with this token is closed for no other one; b"": there is none.
    body_s: float | None  # Deadline for the body of a request with the token; None: `REQUEST_S`.
    # Connections without a request in progress that have not sent the token, the oldest first.
    unused: dict["LimitedProtocol", None]

    _has_token = False
    _timer: asyncio.TimerHandle | None = None
    _num_bytes = 0
    _is_in_headers = True

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.unused[self] = None
        self._begin()
        if len(self.connections) > self.max_connections:
            oldest = next(iter(self.unused))
            oldest._refuse("too_many")
            oldest.transport.abort()
            self.unused.pop(oldest)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        self.unused.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pass on received bytes; close the connection if its header is too large."""
        self._num_bytes += len(data)
        super().data_received(data)
        if self._is_in_headers and self._num_bytes > MAX_HEADER_BYTES:
            self._refuse("large_headers")
            self.transport.write(TOO_LARGE)
            self.transport.close()

    def on_message_begin(self) -> None:
        self._begin()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_headers = False
        if self.token and not self._has_token:
            credentials = next((v for k, v in self.headers if k == b"authorization"), b"")
            self._has_token = hmac.compare_digest(token_in(credentials), self.token)
        if self._has_token and self.body_s is not None:
            self._begin(self.body_s)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._end()
        if not self.cycle or not self.cycle.response_complete:
            self.unused.pop(self, None)
        self._num_bytes = 0
        self._is_in_headers = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        is_idle = self.cycle.response_complete and not self.transport.is_closing()
        if is_idle and not self._has_token:
            self.unused.pop(self, None)
            self.unused[self] = None  # The newest one.

    def _begin(self, limit_s: float | None = None) -> None:
        """Start the timer of the request."""
        self._end()
        self._timer = self.loop.call_later(limit_s or REQUEST_S, self._end_slow_request)

    def _end(self) -> None:
        """Stop the timer of the request."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_slow_request(self) -> None:
        """Close the connection, because its request takes too long."""
        self._refuse("slow")
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        self.refusals.note(self.client, REFUSED[400])
        super().send_400_response(msg)

    def _refuse(self, reason: str) -> None:
        """Count a refused connection."""
        self.counts[reason] += 1
        self.refusals.note(self.client, reason)


class QuietSocket(WebSocketsSansIOProtocol):
    """A WebSocket whose opening and closing is not logged."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = logging.getLogger("envhub.sockets")
        self.logger.setLevel(logging.WARNING)
        self.conn.logger = self.logger


def token_in(header: bytes) -> bytes:
    """Return the token of a Bearer header, or the password of a Basic header.

    A client without token support can put the token into its URL: http://any:TOKEN@host:port.
    """
    kind, _, value = header.partition(b" ")
    if kind.lower() == b"bearer":
        return value
    if kind.lower() != b"basic":
        return b""
    try:
        return base64.b64decode(value, validate=True).partition(b":")[2]
    except ValueError:
        return b""


def limited_protocol(
    counts: Counter[str],
    refusals: Refusals,
    *,
    token: str | None = None,
    body_s: float | None = None,
) -> type[HttpToolsProtocol]:
    """Return the protocol class of one server's connections; it counts refused clients.

    Args:
        token: token of the server's clients. Connections that have sent it stay open while others
            are closed for further ones; None or "": idle connections are closed.
        body_s: seconds for the body of a request with the token; None: those of any request.
    """
    limit = raise_file_limit()

    class ServerProtocol(LimitedProtocol):
        """The connections of one server."""

    ServerProtocol.counts = counts
    ServerProtocol.refusals = refusals
    ServerProtocol.max_connections = min(MAX_CONNECTIONS, limit - min(RESERVED_FILES, limit // 4))
    ServerProtocol.unused = {}
    ServerProtocol.token = (token or "").encode()
    ServerProtocol.body_s = body_s
    return ServerProtocol
