"""An upper bound for Python servers: `python -m benchmarks.envhub.echo PORT` echoes bodies.

It uses the hub's loop and parser (uvloop, httptools), without routes, token or limits. Its only
parser callbacks are those for bodies and for ends of messages.
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
        """Append a part of a body; called by the parser."""
        self._body += body

    def on_message_complete(self) -> None:
        """Send the answer; called by the parser."""
        body = self._body
        self._body = b""
        self._transport.write(HEAD % len(body) + body)


async def _serve(port: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Echo, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1])))
