"""A small HTTP/1.1 client that is cheap enough to load a hub from the core beside it."""

import asyncio
import json
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

REQUEST_TIMEOUT_S = 60.0


class HubAnswer(RuntimeError):
    """The service answered with another status than was needed; holds both."""

    def __init__(self, status: int, body: bytes, *, request: str) -> None:
        super().__init__(f"{request} answered {status}: {body[:300].decode(errors='replace')}")
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a service listens and the token it wants (None: none)."""

    url: str
    token: str | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        parts = urlsplit(self.url)
        return parts.hostname or "127.0.0.1", parts.port or 80

    def head(self, method: str, path: str) -> bytes:
        """Return a request up to the value of its last header, the content's length."""
        host, port = self.address
        token = f"authorization: Bearer {self.token}\r\n" if self.token else ""
        return (
            f"{method} {path} HTTP/1.1\r\nhost: {host}:{port}\r\n{token}"
            "content-type: application/json\r\ncontent-length: "
        ).encode()


class Connection(asyncio.Protocol):
    """One kept-alive connection with at most one request under way.

    Example: `exchange` writes a request and waits; `data_received` gathers bytes until the length
    that the head announced is there and wakes it with status and body. A connection that is lost
    meanwhile wakes it with ConnectionResetError.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[tuple[int, bytes]] | None = None
        self._buffer = b""
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the request under way."""
        self._transport = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(exc or ConnectionResetError("closed before an answer"))

    def data_received(self, data: bytes) -> None:
        """Answer the request under way once the response is whole."""
        self._buffer = self._buffer + data if self._buffer else data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        whole = end + 4 + _content_length(self._buffer[:end])
        if len(self._buffer) < whole:
            return
        status, body = int(self._buffer[9:12]), self._buffer[end + 4 : whole]
        self._buffer = self._buffer[whole:]
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result((status, body))

    @property
    def is_open(self) -> bool:
        """Whether a request can be sent."""
        return self._transport is not None

    async def exchange(self, head: bytes, body: bytes) -> tuple[int, bytes]:
        """Return status and body of the answer to `head` (see `Target.head`) and `body`.

        Raises:
            OSError: the connection was lost.
            TimeoutError: no answer within REQUEST_TIMEOUT_S.
        """
        if self._transport is None:
            raise ConnectionResetError("the connection is closed")
        self._waiter = waiter = self._loop.create_future()
        self._transport.write(b"%s%d\r\n\r\n%s" % (head, len(body), body))
        deadline = self._loop.call_later(REQUEST_TIMEOUT_S, _time_out, waiter)
        try:
            return await waiter
        finally:
            deadline.cancel()

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()


def _time_out(waiter: asyncio.Future[tuple[int, bytes]]) -> None:
    if not waiter.done():
        waiter.set_exception(TimeoutError(f"no answer within {REQUEST_TIMEOUT_S:g} s"))


def _content_length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line[15:])
    return 0  # 204 has none


class Client:
    """JSON requests over one `Connection`, which is opened again when the service closed it."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._connection: Connection | None = None

    async def __aenter__(self) -> "Client":
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._connection is not None:
            self._connection.close()

    async def connect(self) -> Connection:
        """Return the open connection."""
        if self._connection is None or not self._connection.is_open:
            loop = asyncio.get_running_loop()
            _, self._connection = await loop.create_connection(Connection, *self.target.address)
        return self._connection

    async def ask(self, method: str, path: str, content: object = None) -> tuple[int, bytes]:
        """Return status and body of any answer."""
        body = b"" if content is None else json.dumps(content).encode()
        connection = await self.connect()
        return await connection.exchange(self.target.head(method, path), body)

    async def want(self, status: int, method: str, path: str, content: object = None) -> dict:
        """Return the JSON object of an answer that must have `status`.

        Raises:
            HubAnswer: it has another.
        """
        got, body = await self.ask(method, path, content)
        if got != status:
            raise HubAnswer(got, body, request=f"{method} {path}")
        return json.loads(body) if body else {}

    async def open(self, env: str, item_id: str, *, seed: int = 0) -> tuple[str, str]:
        """Return session id and first observation of a new session of a hub."""
        content = {"env": env, "item_id": item_id, "seed": seed}
        answer = await self.want(201, "POST", "/v1/sessions", content)
        return answer["session_id"], answer["observation"]

    async def step(self, session_id: str, action: str, seq: int) -> dict:
        """Return the answer to step `seq` of a session of a hub."""
        path = f"/v1/sessions/{session_id}/step"
        return await self.want(200, "POST", path, {"action": action, "seq": seq})

    async def hint(self, session_id: str) -> dict:
        """Return the valid actions and the expert's action."""
        return await self.want(200, "GET", f"/v1/sessions/{session_id}/hint")

    async def delete(self, session_id: str) -> None:
        """End a session."""
        await self.want(204, "DELETE", f"/v1/sessions/{session_id}")
