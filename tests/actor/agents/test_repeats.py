"""Laws of agents that lose their connection: a repeated request is one turn, and one step."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest

from actor.rollout.episode import EnvSession, OnTokens, Turn
from tests.actor.agents.endpoint import ByHeart, Endpoint, endpoint
from tests.actor.rollout.playing import Count, go_on

CHAT = "/v1/chat/completions"
ASKED = {"messages": [{"role": "user", "content": "Which way?"}]}
WAIT_S = 120.0


@dataclass(slots=True)
class Held(ByHeart):
    """A policy whose first answer waits for a permission."""

    begun: asyncio.Event = field(default_factory=asyncio.Event)
    permitted: asyncio.Event = field(default_factory=asyncio.Event)

    async def act(
        self, ids: list[int], session: EnvSession, /, on_tokens: OnTokens | None = None
    ) -> Turn:
        self.begun.set()
        await self.permitted.wait()
        return await ByHeart.act(self, ids, session, on_tokens)


class Client:
    """One connection that its test may break at any moment."""

    def __init__(self, at: Endpoint, reader: asyncio.StreamReader, writer: Any) -> None:
        self._at = at
        self._reader = reader
        self._writer = writer

    async def send(self, path: str, body: dict[str, Any], **headers: str) -> None:
        sent = json.dumps(body).encode()
        head = [f"POST {path} HTTP/1.1", "host: x", f"authorization: Bearer {self._at.episode.key}"]
        head += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        head += [f"content-length: {len(sent)}", "", ""]
        self._writer.write("\r\n".join(head).encode() + sent)
        await self._writer.drain()

    async def receive(self) -> tuple[int, Any]:
        """Return status and body of the next answer."""
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        fields = dict(line.split(": ", 1) for line in head[1:] if line)
        body = await self._reader.readexactly(int(fields["content-length"]))
        return int(head[0].split()[1]), json.loads(body)

    async def ask(self, path: str, body: dict[str, Any], **headers: str) -> tuple[int, Any]:
        await self.send(path, body, **headers)
        return await self.receive()

    async def is_closed(self) -> bool:
        """Wait until the server closes the connection."""
        try:
            return await self._reader.read() == b""
        except ConnectionError:
            return True

    def close(self) -> None:
        self._writer.close()

    def reset(self) -> None:
        """Break the connection without reading."""
        connection = self._writer.get_extra_info("socket")
        no_linger = b"\1\0\0\0\0\0\0\0"
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_linger)
        self._writer.transport.abort()


@asynccontextmanager
async def connected(at: Endpoint) -> AsyncIterator[Client]:
    place = urlsplit(at.server.url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    try:
        yield Client(at, reader, writer)
    finally:
        writer.close()


async def until(is_true: Callable[[], object]) -> None:
    """Let the server work until a condition holds."""
    async with asyncio.timeout(WAIT_S):
        while not is_true():
            await asyncio.sleep(0.005)


def num_connections(at: Endpoint) -> int:
    return len(at.server.http.state.connections)


def text_of(answer: Any) -> str:
    """Return the text of an answer, or of its stream."""
    if not isinstance(answer, str):
        return answer["choices"][0]["message"]["content"]
    chunks = [line[6:] for line in answer.splitlines() if line.startswith("data: {")]
    return "".join(json.loads(each)["choices"][0]["delta"].get("content", "") for each in chunks)


@pytest.mark.parametrize("is_reset", [False, True])
@pytest.mark.parametrize("more", [{}, {"stream": True}])
@pytest.mark.parametrize("is_done_before", [False, True])
def test_request_repeated_after_a_lost_connection_is_one_turn(
    is_reset: bool, more: dict[str, Any], is_done_before: bool
) -> None:
    """The second request arrives during the answer, or after it."""

    async def run() -> None:
        policy = Held(["go left", "go right"])
        async with endpoint(policy) as at:
            async with connected(at) as broken:
                await broken.send(CHAT, {**ASKED, **more})
                await policy.begun.wait()
                broken.reset() if is_reset else broken.close()
                await until(lambda: not num_connections(at))
            if is_done_before:
                policy.permitted.set()
                await until(lambda: at.sampled)
            again = asyncio.create_task(at.post(CHAT, {**ASKED, **more}))
            await until(lambda: num_connections(at))
            policy.permitted.set()
            status, answer = await again
            assert (status, len(policy.given)) == (200, 1)
            assert text_of(answer) == "go left"
            assert at.tape.starts == [0]
            assert sum(at.tape.loss_mask) == len(policy.renderer.completion("go left")) + 1
            # The client has read that answer, so the same request is a new one.
            assert (await at.post(CHAT, {**ASKED, **more}))[0] == 200
            assert len(policy.given) == 2

    asyncio.run(run())


def test_unread_answer_is_repeated_and_a_read_one_is_not() -> None:
    async def run() -> None:
        policy = ByHeart(["go left", "go right"])
        async with endpoint(policy) as at:
            async with connected(at) as deaf:
                await deaf.send(CHAT, ASKED)
                await until(lambda: at.sampled)
                await asyncio.sleep(0)
                deaf.reset()  # The answer is in the buffers of its connection.
                await until(lambda: not num_connections(at))
            _, again = await at.post(CHAT, ASKED)
            assert (again["choices"][0]["message"]["content"], len(policy.given)) == ("go left", 1)
            async with connected(at) as reading:
                _, other = await reading.ask(CHAT, ASKED)
                assert other["choices"][0]["message"]["content"] == "go right"
            await until(lambda: num_connections(at) == 1)  # The one of `at`.
            await at.post(CHAT, ASKED)
            assert len(policy.given) == 3

    asyncio.run(run())


@pytest.mark.parametrize("name", ["idempotency_key", "x_stainless_retry_count"])
def test_marked_retry_gets_the_first_answer(name: str) -> None:
    """The first connection stays open, as behind a network that breaks silently."""

    async def run() -> None:
        policy = Held(["go left", "go right"])
        async with endpoint(policy) as at, connected(at) as silent, connected(at) as client:
            first = {name: "a"} if name == "idempotency_key" else {name: "0"}
            again = {name: "a"} if name == "idempotency_key" else {name: "1"}
            await silent.send(CHAT, ASKED, **first)
            await policy.begun.wait()
            await client.send(CHAT, ASKED, **again)
            policy.permitted.set()
            answers = [await silent.receive(), await client.receive()]
            assert answers[0] == answers[1]
            assert await client.ask(CHAT, ASKED, **again) == answers[0]
            assert len(policy.given) == 1
            other = {name: "b"} if name == "idempotency_key" else first
            await client.ask(CHAT, ASKED, **other)
            assert len(policy.given) == 2

    asyncio.run(run())


def test_failed_request_is_handled_again() -> None:
    async def run() -> None:
        async with endpoint(ByHeart(["go"])) as at, connected(at) as client:
            wrong = {**ASKED, "logit_bias": {"5": 1}}
            for _ in range(2):
                status, _ = await client.ask(CHAT, wrong, idempotency_key="a")
                assert status == 400
            assert at.episode.refused == {"unsupported_parameter": 2}

    asyncio.run(run())


class Slow(Count):
    """A session whose steps wait for a permission."""

    def __init__(self, *answers: Any) -> None:
        super().__init__(list(answers))
        self.permitted = asyncio.Event()

    async def step(self, action: str) -> Any:
        answer = await super().step(action)
        await self.permitted.wait()
        return answer


def test_step_repeated_after_a_lost_connection_is_made_once() -> None:
    async def run() -> None:
        session = Slow(go_on(), go_on(reward=0.5), go_on(reward=1.0, done=True))
        look = {"action": "look"}
        async with endpoint(ByHeart(["go"]), session=session) as at:
            await at.post(CHAT, ASKED)

            async def lose(action: dict[str, Any]) -> None:
                num = len(session.actions)
                async with connected(at) as broken:
                    await broken.send("/env/step", action)
                    await until(lambda: len(session.actions) > num)

            await lose(look)
            await until(lambda: num_connections(at) == 1)
            session.permitted.set()
            for reward in (0.0, 0.5):  # The second one is a step of its own.
                assert (await at.post("/env/step", look))[1]["reward"] == reward
            assert session.actions == ["look", "look"]
            session.permitted.clear()
            await lose({"action": "take"})
            await until(lambda: num_connections(at) == 1)
            session.permitted.set()
            await at.episode.ended.wait()
            status, last = await at.post("/env/step", {"action": "take"})
            assert (status, last["done"], last["reward"]) == (200, True, 1.0)
            assert session.actions == ["look", "look", "take"]

    asyncio.run(run())


def test_lost_step_is_not_repeated_after_another_one() -> None:
    async def run() -> None:
        session = Slow(go_on(), go_on(reward=0.25), go_on(reward=0.5))
        session.permitted.set()
        async with endpoint(ByHeart(["go"]), session=session) as at:
            async with connected(at) as broken:
                await broken.send("/env/step", {"action": "look"})
                await until(lambda: session.actions)
                broken.reset()
            await until(lambda: not num_connections(at))
            await at.post("/env/step", {"action": "go"})
            assert (await at.post("/env/step", {"action": "look"}))[1]["reward"] == 0.5
            assert session.actions == ["look", "go", "look"]

    asyncio.run(run())
