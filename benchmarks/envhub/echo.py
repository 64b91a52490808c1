"""What any Python server is bounded by: `python -m benchmarks.envhub.echo PORT` echoes bodies.

The hub's loop and parser (uvloop, httptools), and nothing else: no routes, no token, no limits.
It is told of bodies and ends of messages alone; what else the parser finds it does not look at.
"""

import asyncio
import sys
from typing import cast

import httptools
import uvloop

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


class Echo(asyncio.Protocol):
    """Answers each request with its body."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        """Take in a part of a body; called by the parser."""
        self._body += body

    def on_message_complete(self) -> None:
        """Answer; called by the parser."""
        body, self._body = self._body, b""
        self._transport.write(HEAD % len(body) + body)


async def _serve(port: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Echo, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1])))
