"""Limits on connections before authentication: header size, request time and number."""

import asyncio
import logging
from collections import Counter
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from common.wire.access.connections import RESERVED_FILES, raise_file_limit
from envhub.http.arrivals import Arrivals
from envhub.http.known_heads import HeaderCache
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
    """Closes connections with oversized headers, slow requests, or no requests.

    Requests that `known` can answer bypass the application.
    """

    # Slots keep the attributes of the fast path together, apart from the base class's three dozen.
    __slots__ = ("_come", "_wake", "answered_at", "is_quick", "transport")

    counts: Counter[str]
    refusals: Refusals
    max_connections: int
    unused: dict["LimitedProtocol", None]  # Connections without a complete request yet, in order.
    known: HeaderCache
    arrivals: Arrivals

    _timer: asyncio.TimerHandle | None = None
    _num_bytes = 0
    _is_in_headers = True

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._come = self.arrivals.come
        self._wake = self.arrivals.wake
        self.is_quick = False
        self.answered_at = 0.0
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
        if not self._come:
            self._wake()
        self._come.append((self, data))

    def take(self, data: bytes) -> None:
        """Answer the received data, or pass it to the parser."""
        if self.transport.is_closing():
            return
        cycle = self.cycle  # No partial request is buffered, and all earlier requests are answered:
        is_first = not self._num_bytes and (cycle is None or cycle.response_complete)
        is_free = is_first and not self.flow.write_paused
        self.is_quick = False
        if is_free:
            response = self.known.answer(data, self.known.now_s())
            if response is not None:
                self._answer(response)
                return
        self._num_bytes += len(data)
        super().data_received(data)
        if self._is_in_headers and self._num_bytes > MAX_HEADER_BYTES:
            self._refuse("large_headers")
            self.transport.write(TOO_LARGE)
            self.transport.close()
        elif is_first and not self._num_bytes and self.cycle is not None:
            self._learn(data)

    def _answer(self, response: bytes) -> None:
        """Answer a single complete request whose head is cached."""
        if self._timer is not None:
            self._end()
            self.unused.pop(self, None)
        self.is_quick, self.answered_at = True, self.loop.time()
        self.transport.write(response)
        if self.timeout_keep_alive_task is None:
            self._keep_alive(self.timeout_keep_alive)

    def pause_writing(self) -> None:
        self.is_quick = False
        super().pause_writing()

    def _learn(self, data: bytes) -> None:
        if self.scope["http_version"] == "1.1" and self.cycle.keep_alive:
            self.known.learn(data, self.scope["method"], self.url, self.headers)

    def _keep_alive(self, delay_s: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(
            delay_s, self.timeout_keep_alive_handler
        )

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection after a long idle time; fast answers do not restart the timer."""
        left_s = self.answered_at + self.timeout_keep_alive - self.loop.time()
        if left_s > 0:
            self._keep_alive(left_s)
        else:
            super().timeout_keep_alive_handler()

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
        self._end()
        self._timer = self.loop.call_later(REQUEST_S, self._give_up)

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._refuse("slow")
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        self.refusals.note(self.client, REFUSED[400])
        super().send_400_response(msg)

    def _refuse(self, reason: str) -> None:
        self.counts[reason] += 1
        self.refusals.note(self.client, reason)


class QuietSocket(WebSocketsSansIOProtocol):
    """A WebSocket whose opening and closing is not logged."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = logging.getLogger("envhub.sockets")
        self.logger.setLevel(logging.WARNING)


def limited_protocol(
    counts: Counter[str], refusals: Refusals, known: HeaderCache
) -> type[HttpToolsProtocol]:
    """Return the protocol class of one hub's connections; it counts refused clients."""
    limit = raise_file_limit()
    own = {
        "counts": counts,
        "refusals": refusals,
        "max_connections": min(MAX_CONNECTIONS, limit - min(RESERVED_FILES, limit // 4)),
        "unused": {},
        "known": known,
        "arrivals": Arrivals(known),
    }
    return type("HubProtocol", (LimitedProtocol,), own)
