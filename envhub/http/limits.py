"""What a connection may do before anybody has looked at its token: little, and not for long."""

import asyncio
from collections import Counter
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from common.wire.access.connections import RESERVED_FILES, raise_file_limit

MAX_HEADER_BYTES = 64 * 1024  # of one request, its path with them
REQUEST_S = 20.0  # from the first byte of a request, or from connecting, to its last byte
MAX_CONNECTIONS = 20_000  # or what the descriptors allow; one more ends the oldest that is unused
TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)


class LimitedProtocol(HttpToolsProtocol):
    """Ends connections with endless headers, slow requests, or nothing to say."""

    counts: Counter[str]
    max_connections: int
    unused: dict[Any, None]  # connections without a whole request yet, in their order

    _timer: asyncio.TimerHandle | None = None
    _num_bytes = 0
    _is_in_headers = True

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.unused[self] = None
        self._begin()
        if len(self.connections) > self.max_connections:
            oldest = next(iter(self.unused))
            self.counts["too_many"] += 1
            oldest.transport.abort()
            self.unused.pop(oldest)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        self.unused.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._num_bytes += len(data)
        super().data_received(data)
        if self._is_in_headers and self._num_bytes > MAX_HEADER_BYTES:
            self.counts["large_headers"] += 1
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
        self._num_bytes, self._is_in_headers = 0, True
        super().on_message_complete()

    def _begin(self) -> None:
        self._end()
        self._timer = self.loop.call_later(REQUEST_S, self._give_up)

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self.counts["slow"] += 1
        self.transport.abort()


def limited_protocol(counts: Counter[str]) -> type[HttpToolsProtocol]:
    """Return the protocol of one hub's connections; it counts in `counts` whom it sends away."""
    limit = raise_file_limit()
    own = {
        "counts": counts,
        "max_connections": min(MAX_CONNECTIONS, limit - min(RESERVED_FILES, limit // 4)),
        "unused": {},
    }
    return type("HubProtocol", (LimitedProtocol,), own)
