"""Limits on connections before authentication: header size, request time and number."""

import asyncio
import logging
from collections import Counter
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from common.wire.access.connections import RESERVED_FILES, raise_file_limit
from envhub.http.refusals import REFUSED, Refusals

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
    unused: dict["LimitedProtocol", None]  # Connections without a complete request yet, in order.

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
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._end()
        self.unused.pop(self, None)
        self._num_bytes = 0
        self._is_in_headers = True
        super().on_message_complete()

    def _begin(self) -> None:
        """Start the timer of the request."""
        self._end()
        self._timer = self.loop.call_later(REQUEST_S, self._end_slow_request)

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


def limited_protocol(counts: Counter[str], refusals: Refusals) -> type[HttpToolsProtocol]:
    """Return the protocol class of one hub's connections; it counts refused clients."""
    limit = raise_file_limit()
    own = {
        "counts": counts,
        "refusals": refusals,
        "max_connections": min(MAX_CONNECTIONS, limit - min(RESERVED_FILES, limit // 4)),
        "unused": {},
    }
    return type("HubProtocol", (LimitedProtocol,), own)
