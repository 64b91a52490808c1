"""Laws of an actor's servers that end while clients connect."""

import asyncio
import gc
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

import pytest
import uvloop

from actor.agents.server import AgentServer
from actor.api.chat import Chat, listening


@asynccontextmanager
async def agents() -> AsyncGenerator[str]:
    server = AgentServer()
    await server.start()
    try:
        yield server.url
    finally:
        await server.close()


def chat() -> AbstractAsyncContextManager[str]:
    unused = cast(Any, SimpleNamespace(tokenizer=None))
    fields: dict[str, Any] = dict.fromkeys(("engine", "renderer", "actor", "numbers"), unused)
    return listening(Chat(**fields, key="", name=str))


@pytest.mark.parametrize("num_passes", range(6))
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("server", [agents, chat])
def test_connection_that_arrives_at_the_end_is_closed(
    server: Callable[[], AbstractAsyncContextManager[str]],
    run: Callable[..., socket.socket],
    num_passes: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def serve() -> socket.socket:
        async with server() as url:
            place = urlsplit(url)
            client = socket.create_connection((place.hostname, place.port), timeout=10.0)
            for _ in range(num_passes):
                await asyncio.sleep(0)
        return client

    with run(serve()) as client:
        gc.collect()  # A connection that was never closed would raise a ResourceWarning.
        with suppress(ConnectionResetError):
            assert client.recv(1) == b""
    assert not caplog.records
