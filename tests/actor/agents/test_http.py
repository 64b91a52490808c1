"""Laws of the agents' HTTP over sockets: whatever a client's ways, it is answered in order."""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable

import pytest
import uvloop
from starlette.responses import Response

from actor.agents import http
from actor.agents.http import AgentRequest, HttpServer
from actor.api.requests import ApiError

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HEAD = b"POST /a?b=1 HTTP/1.1\r\nhost: x\r\nAuthorization: bearer k1 \r\n"


async def _echo(request: AgentRequest) -> Response:
    """Echo the request; shorter bodies are answered later."""
    await asyncio.sleep(0.05 / (1 + len(request.content)))
    return Response(f"{request.method} {request.path} {request.key} {request.content.decode()}")


def serve(talk: Talk) -> list[str]:
    """Talk to an echo server over a socket; return the codes of the refused requests."""
    refused: list[str] = []

    def failed(_: AgentRequest, failure: BaseException) -> Response:
        assert isinstance(failure, ApiError)
        refused.append(failure.code)
        return Response(failure.code, status_code=failure.status)

    async def run() -> None:
        server = HttpServer(_echo, failed)
        listener = socket.create_server(("127.0.0.1", 0))
        await server.start(listener)
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        async with asyncio.timeout(120):
            await talk(reader, writer)
            writer.close()
            while server.state.connections:
                await asyncio.sleep(0.01)
        await server.close()

    asyncio.run(run())
    return refused


async def answer(reader: asyncio.StreamReader) -> tuple[str, str]:
    """Return the first line of an answer, and its content."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    fields = dict(line.split(": ", 1) for line in head[1:] if line)
    return head[0], (await reader.readexactly(int(fields["content-length"]))).decode()


def post(body: bytes, head: bytes = HEAD) -> bytes:
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


def test_pipelined_requests_are_answered_in_order() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(post(b"1") + post(b"22" * 50) + post(b"3"))
        told = [await answer(reader) for _ in range(3)]
        assert {line for line, _ in told} == {"HTTP/1.1 200 OK"}
        assert [said.split()[:3] for _, said in told] == [["POST", "/a", "k1"]] * 3
        assert [said.split()[3] for _, said in told] == ["1", "22" * 50, "3"]

    assert serve(talk) == []


@pytest.mark.parametrize(
    ("head", "is_last"),
    [
        (b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n", False),
        (b"Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n", False),
        (b"Connection: close\r\n", True),
    ],
)
def test_common_http_client_variants_are_accepted(head: bytes, is_last: bool) -> None:
    """A client that would rather have HTTP/2, one that sends chunks, one that asks but once."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = HEAD + head if b"chunked" in head else post(b"hello", HEAD + head)
        writer.write(asked)
        assert (await answer(reader))[1] == "POST /a k1 hello"
        if is_last:
            assert await reader.read() == b""
        else:
            writer.write(post(b"again"))
            assert (await answer(reader))[1] == "POST /a k1 again"

    assert serve(talk) == []


def test_expect_continue_header_gets_a_100_response() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"Expect: 100-continue\r\ncontent-length: 5\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"hello")
        assert (await answer(reader))[1] == "POST /a k1 hello"

    assert serve(talk) == []


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", 400, "invalid_request"),
        (HEAD + b"x-long: " + b"x" * http.MAX_HEAD_BYTES, 431, "request_header_fields_too_large"),
        (post(b"x" * (http.MAX_BODY_BYTES + 1)), 413, "request_entity_too_large"),
        (HEAD + b"content-length: 9\r\n\r\nhell", 408, "request_timeout"),
    ],
)
def test_malformed_request_is_refused_with_its_code(
    sent: bytes, status: int, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if status == 408:
        monkeypatch.setattr(http, "BODY_S", 1.0)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        line, said = await answer(reader)
        assert (line.split()[1], said) == (str(status), code)
        if status != 413:  # of which all was read
            assert await reader.read() == b""

    assert serve(talk) == [code]


def test_server_counts_incomplete_bodies_and_disconnects_floods() -> None:
    async def leave(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"content-length: 9\r\n\r\nhell")
        await writer.drain()
        await asyncio.sleep(0.1)

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(post(b"") * (http.MAX_WAITING + 2))
        with contextlib.suppress(ConnectionError):
            while await reader.read(1 << 16):
                pass
        assert writer.is_closing() or reader.at_eof()

    assert serve(leave) == ["incomplete_body"]
    assert serve(flood) == []


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_answers_are_sent_without_a_delay(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """Nagle's algorithm would hold the second write of an answer back for 40 ms."""

    async def run() -> None:
        server = HttpServer(_echo, lambda _, failure: Response(str(failure)))
        listener = socket.create_server(("127.0.0.1", 0))
        await server.start(listener)
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(post(b"hello"))
        await answer(reader)
        (connection,) = server.state.connections
        place = connection.transport.get_extra_info("socket")
        assert place.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        writer.close()
        await server.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(run())
