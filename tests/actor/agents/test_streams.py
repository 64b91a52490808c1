"""Laws of streams: sent as the policy samples, aborted or repeated, each token captured once."""

import asyncio
import json
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from jinja2 import TemplateError

from actor.agents import streams
from actor.api.parts import PartialAnswer
from actor.api.prompts import read_turn, thoughts_of
from actor.api.requests import PolicyRequest
from actor.formats.renderer import Renderer
from actor.formats.sampled import without_marks
from actor.rollout.context import Turn
from actor.rollout.episode import EnvSession, OnTokens, trajectory_of
from common.errors import ConfigError, EngineError
from common.formats.calls import as_call
from common.text import shared_length
from common.wire.messages import Trajectory
from tests.actor.agents.endpoint import RENDERER, ByHeart, Endpoint, endpoint
from tests.actor.agents.streaming_clients import timings
from tests.actor.agents.test_apis import BARE, CHAT, FLAT, MESSAGES, NAMED, RESPONSES, events_of
from tests.actor.agents.test_lineages import LONG, Recorded, of_engine, said, trained, user
from tests.actor.agents.test_repeats import Client, connected, num_connections, until
from tests.actor.agents.test_tool_calls import LOOK, TOOL
from tests.actor.formats.trl_templates import PICTURES, names, tokenizer_of

TEXT = "go to the house on the left"
ASKED = {"messages": [user("Which way?")], "stream": True}
# The body of each API's request for a stream, and the path of a text in its events.
STREAMED: dict[str, dict[str, Any]] = {
    CHAT: ASKED,
    BARE: {"prompt": "Which way?", "stream": True},
    RESPONSES: {"input": "Which way?", "stream": True},
    MESSAGES: {**ASKED, "max_tokens": 99},
}


def text_in(event: dict[str, Any]) -> str:
    """Return the text of the answer in an event of any API."""
    if choices := event.get("choices"):
        return choices[0].get("text") or choices[0].get("delta", {}).get("content") or ""
    delta = event.get("delta", "")
    if isinstance(delta, dict):
        return delta.get("text", "")
    return delta if event.get("type") == "response.output_text.delta" else ""


@dataclass(slots=True)
class Paused(Recorded):
    """A policy that waits for a permission before one of its tokens."""

    at: int = 3
    waits: asyncio.Event = field(default_factory=asyncio.Event)
    permitted: asyncio.Event = field(default_factory=asyncio.Event)
    was_cancelled: bool = False

    async def before_token(self, number: int) -> None:
        if number == self.at:
            self.waits.set()
            try:
                await self.permitted.wait()
            except asyncio.CancelledError:
                self.was_cancelled = True
                raise


class Reader:
    """The events of a stream, one by one."""

    def __init__(self, client: Client) -> None:
        self._reader = client._reader
        self._text = ""

    async def head(self) -> int:
        """Return the status."""
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode()
        assert "transfer-encoding: chunked" in head.lower()
        return int(head.split()[1])

    async def until(self, is_wanted: Callable[[str], bool]) -> str:
        """Read chunks until the text of the answer so far is the wanted one."""
        while not is_wanted(text := "".join(text_in(event) for event in self._events())):
            size = int((await self._reader.readuntil(b"\r\n")).strip(), 16)
            assert size, self._text
            self._text += (await self._reader.readexactly(size + 2))[:-2].decode()
        return text

    def _events(self) -> list[dict[str, Any]]:
        whole = self._text.rpartition("\n\n")[0]
        lines = [line for line in whole.splitlines() if line.startswith("data: {")]
        return [json.loads(line[6:]) for line in lines]


def closed(at: Endpoint) -> Trajectory:
    """Return the episode after its agent has left."""
    at.episode.leave()
    return trajectory_of(LONG, at.play, actor="actor-0", wall_s=0.0)


@pytest.mark.parametrize("path", STREAMED)
def test_text_is_sent_before_the_next_token_is_sampled(path: str) -> None:
    async def run() -> None:
        policy = Paused([TEXT], at=4)
        async with endpoint(policy, lease=LONG) as at, connected(at) as client:
            reader = Reader(client)
            await client.send(path, STREAMED[path])
            await policy.waits.wait()
            assert await reader.head() == 200
            begin = RENDERER.shown(policy.sampled[0][1].token_ids[:4]).rstrip()
            assert await reader.until(lambda text: text == begin) == begin != TEXT
            assert not at.sampled
            policy.permitted.set()
            assert await reader.until(lambda text: text == TEXT)
            await until(lambda: at.sampled)
            assert trained(closed(at)) == of_engine(policy.sampled)

    asyncio.run(run())


@pytest.mark.parametrize("path", STREAMED)
def test_cancelled_stream_aborts_the_engine_and_keeps_its_tokens(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "RECONNECT_S", 0.05)

    async def run() -> None:
        policy = Paused([TEXT, "other"])
        async with endpoint(policy, lease=LONG) as at:
            async with connected(at) as client:
                await client.send(path, STREAMED[path])
                await policy.waits.wait()
                await Reader(client).head()
                client.reset()
            await until(lambda: policy.was_cancelled)
            await until(lambda: at.sampled)
            assert at.sampled == policy.sampled[0][1].token_ids[:3]
            assert at.play.num_sampled == 3
            policy.permitted.set()
            # The answer is not complete, so the same request is a new one.
            _, again = await at.post(path, STREAMED[path])
            texts = [text_in(json.loads(data)) for _, data in events_of(again) if data[0] == "{"]
            assert "".join(texts) == "other"
            trajectory = closed(at)
        ids, turn = policy.sampled[0]
        part = replace(turn, token_ids=turn.token_ids[:3], logprobs=turn.logprobs[:3])
        assert trained(trajectory) == of_engine([(ids, part), policy.sampled[1]])

    asyncio.run(run())


def test_end_of_the_episode_keeps_the_tokens_of_an_open_stream() -> None:
    async def run() -> None:
        policy = Paused([TEXT])
        async with endpoint(policy, lease=LONG) as at, connected(at) as client:
            await client.send(CHAT, ASKED)
            await policy.waits.wait()
            trajectory = closed(at)
            ids, turn = policy.sampled[0]
            part = replace(turn, token_ids=turn.token_ids[:3], logprobs=turn.logprobs[:3])
            assert trained(trajectory) == of_engine([(ids, part)])
            policy.permitted.set()
            await until(lambda: not at.server._streams)
            assert trained(closed(at)) == of_engine([(ids, part)])

    asyncio.run(run())


def test_stream_that_is_aborted_after_its_last_token_keeps_all_tokens() -> None:
    async def run() -> None:
        policy = Paused([TEXT])
        async with endpoint(policy, lease=LONG) as at, connected(at) as client:
            await client.send(CHAT, ASKED)
            await policy.waits.wait()
            async with at.episode._sampled:  # Another request holds the condition.
                policy.permitted.set()
                await until(lambda: at.play.num_sampled)
                for stream in list(at.server._streams):
                    stream.abort()
                await until(lambda: not at.server._streams)
            assert trained(closed(at)) == of_engine(policy.sampled)
            assert at.episode._num_in_flight == 0

    asyncio.run(run())


@pytest.mark.parametrize("headers", [{}, {"x_stainless_retry_count": "1"}])
def test_repeated_stream_continues_the_first_answer(headers: dict[str, str]) -> None:
    """The second client receives the events from the first one on, then those to come."""

    async def run() -> None:
        policy = Paused([TEXT, "other"])
        async with endpoint(policy, lease=LONG) as at, connected(at) as again:
            async with connected(at) as first:
                await first.send(CHAT, ASKED)
                await policy.waits.wait()
                await Reader(first).head()
                if not headers:
                    first.reset()
                    await until(lambda: num_connections(at) == 1)
                await again.send(CHAT, ASKED, **headers)
                reader = Reader(again)
                await reader.head()
                await reader.until(bool)
                policy.permitted.set()
                assert await reader.until(lambda text: text == TEXT)
            await until(lambda: at.sampled)
            assert not policy.was_cancelled
            assert trained(closed(at)) == of_engine(policy.sampled)
            assert len(policy.sampled) == 1

    asyncio.run(run())


def test_complete_stream_is_repeated_as_a_whole() -> None:
    async def run() -> None:
        policy = ByHeart([TEXT, "other"])
        async with endpoint(policy) as at:
            async with connected(at) as deaf:
                await deaf.send(CHAT, ASKED)
                await until(lambda: at.sampled)
                deaf.reset()
                await until(lambda: not num_connections(at))
            _, again = await at.post(CHAT, ASKED)
            events = [json.loads(data) for _, data in events_of(again) if data[0] == "{"]
            assert [text for text in map(text_in, events) if text] == [TEXT]
            assert len(policy.given) == 1

    asyncio.run(run())


class PausedWhole(Paused):
    """A policy that also waits before a whole turn, which has all tokens."""

    async def act(
        self, ids: list[int], session: EnvSession, /, on_tokens: OnTokens | None = None
    ) -> Turn:
        if on_tokens is None:
            await self.before_token(self.at)
        return await Paused.act(self, ids, session, on_tokens)


@pytest.mark.parametrize(
    ("more", "text"),
    [({"stop": " the"}, "go to"), ({"stop": ["he ho", "xx"]}, "go to t"), ({"max_tokens": 3}, "")],
)
def test_stop_text_and_limit_end_the_sampling(more: dict[str, Any], text: str) -> None:
    """A stream and a whole answer have the same text and the same tokens."""

    async def run(*, is_streamed: bool) -> tuple[str, Any, list[int]]:
        policy = PausedWhole([TEXT], at=20)
        async with endpoint(policy) as at, asyncio.timeout(20):
            _, answer = await at.post(CHAT, {**ASKED, **more, "stream": is_streamed})
            assert not policy.waits.is_set()
            if not is_streamed:
                choice = answer["choices"][0]
                return choice["message"]["content"], choice["finish_reason"], at.sampled
            events = [json.loads(data) for _, data in events_of(answer) if data[0] == "{"]
            reason = events[-1]["choices"][0]["finish_reason"]
            return "".join(map(text_in, events)), reason, at.sampled

    whole = asyncio.run(run(is_streamed=False))
    assert asyncio.run(run(is_streamed=True)) == whole
    begin = RENDERER.shown(whole[2]).rstrip()
    assert TEXT.startswith(begin)
    assert whole[0] == text or (not text and whole[0] == begin)


@pytest.mark.parametrize("path", STREAMED)
def test_failure_in_mid_stream_is_reported_and_fails_the_episode(path: str) -> None:
    class Dying(ByHeart):
        async def before_token(self, number: int) -> None:
            if number == 3:
                raise EngineError("engine died: killed by SIGKILL")

    async def run() -> None:
        async with endpoint(Dying([TEXT])) as at:
            status, stream = await at.post(path, STREAMED[path])
            assert status == 200
            _, data = events_of(stream)[-1]
            event = json.loads(data)
            error = event.get("error") or event["response"]["error"]
            assert "engine died" in error["message"]
            assert "engine died" in str(at.episode.failed.exception())
            assert at.episode.refused == {"policy_failed": 1}

    asyncio.run(run())


def test_streams_of_n_answers_carry_their_logprobs_once() -> None:
    async def run() -> None:
        policy = Recorded(["one two", f"I look.\n{LOOK}", "three"])
        async with endpoint(policy, lease=LONG) as at:
            body = {**ASKED, "n": 3, "logprobs": True, "tools": [TOOL]}
            _, stream = await at.post(CHAT, body)
            entries: list[list[float]] = [[], [], []]
            calls = 0
            for _, data in events_of(stream):
                for choice in json.loads(data)["choices"] if data[0] == "{" else ():
                    report = choice["logprobs"] or {"content": []}
                    entries[choice["index"]] += [each["logprob"] for each in report["content"]]
                    calls += len(choice["delta"].get("tool_calls", []))
            assert sorted(entries) == sorted(turn.logprobs for _, turn in policy.sampled)
            assert calls == 1
            assert trained(closed(at)) == of_engine(policy.sampled)

    asyncio.run(run())


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_call_is_sent_whole_after_the_text_before_it(path: str) -> None:
    tools = {CHAT: TOOL, RESPONSES: FLAT, MESSAGES: NAMED}

    async def run() -> None:
        policy = ByHeart([f"I look <there> {{now}}.\n{LOOK}"])
        async with endpoint(policy) as at:
            _, stream = await at.post(path, {**STREAMED[path], "tools": [tools[path]]})
            events = [json.loads(data) for _, data in events_of(stream) if data[0] == "{"]
            texts = [text_in(event) for event in events]
            assert "".join(texts) == "I look <there> {now}."
            *_, last = (number for number, text in enumerate(texts) if text)
            assert sum(map(bool, texts)) > 5
            assert any("up" in f"{event}" for event in events[last + 1 :])
            assert not any("up" in f"{event}" for event in events[: last + 1])

    asyncio.run(run())


class Paced(Recorded):
    """A policy that samples 50 tokens in a second."""

    async def before_token(self, number: int) -> None:
        await asyncio.sleep(0.02)


@pytest.mark.slow
def test_client_packages_read_the_first_token_long_before_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "RECONNECT_S", 0.1)

    async def run() -> None:
        policy = Paced([f"{TEXT} " * 6])
        async with endpoint(policy, lease=LONG) as at:
            for first_s, whole_s, number in (await timings(at.server.url, at.episode.key)).values():
                assert number > 50
                assert 0 < first_s < whole_s / 3
            await until(lambda: not at.server._streams)
            num_answer = len(policy.sampled[0][1].token_ids)
            num_whole, num_left = divmod(len(at.sampled), num_answer)
            assert num_whole == 6
            assert 0 < num_left < num_answer

    asyncio.run(run())


def answers_of(renderer: Renderer) -> list[str]:
    """Return answers in the form of a template: thoughts, calls, and what resembles them."""
    texts = [
        "Hi there é € 🙂 you. ok <b> [x] {y}",
        "</think> weird </think> x",
        "abc </think> d <think> e </think> f",
        "<think>why</think>\n\n go",
        "  lead \n ",
        "[look",
    ]
    for opens, closes in renderer.thoughts.blocks:
        texts.append(without_marks(f"{opens}why so{closes}\nanswer <x {closes} z"))
    if isinstance(renderer.calls, str):
        return texts
    asked = [{"role": "user", "content": "q"}]
    calls = [as_call("look", {"where": where}) for where in ("up", "down")]
    for content in ("", "I look. "):
        for num in (1, 2):
            answer = {"role": "assistant", "content": content, "tool_calls": calls[:num]}
            with suppress(TemplateError):  # Some templates show one call only.
                whole = renderer.rendered([*asked, answer], tools=[TOOL], is_asking=False)
                prompt = renderer.rendered(asked, tools=[TOOL])
                sampled = whole[shared_length(whole, prompt) :]
                texts += [sampled, f"{sampled} and more", sampled[:-12], f"[{sampled}"]
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("name", [each for each in names() if each not in PICTURES])
def test_parts_of_any_answer_join_to_the_whole_one(name: str) -> None:
    """With tools and without, in any pieces, for the chat templates of many models."""
    tokenizer = tokenizer_of(name)
    try:
        renderer = Renderer(tokenizer).of_streams
    except ConfigError:
        pytest.skip("this template cannot be used")
    draw = random.Random(0)
    for text in answers_of(renderer):
        ids = tokenizer.encode(text, add_special_tokens=False)
        ids = [each for each in ids if each not in renderer.end_of_turn_ids]
        for tools in [[], [TOOL]] if not isinstance(renderer.calls, str) else [[]]:
            asked = PolicyRequest(messages=[user("q")], tools=tools)
            partial = PartialAnswer(renderer, asked, num_prompt=1)
            texts = thoughts = ""
            at = 0
            while at < len(ids):
                end = at + draw.randint(1, 4)
                new = ids[at:end]
                part = partial.add(Turn(new, [0.0] * len(new), [0] * len(new)))
                texts += part.text
                thoughts += part.thoughts
                at = end
            whole, _ = read_turn(renderer, ids, asked, None)
            assert whole.startswith(texts), (text, tools)
            assert thoughts_of(renderer, ids, asked).startswith(thoughts), (text, tools)
            assert partial._growing.text == renderer._sampled.marked(ids)


def test_history_of_a_cancelled_stream_continues_its_tokens() -> None:
    async def run() -> None:
        policy = Paused([TEXT, "other"], at=4)
        async with endpoint(policy, lease=LONG) as at:
            async with connected(at) as client:
                await client.send(CHAT, ASKED)
                await policy.waits.wait()
                (stream,) = at.server._streams
                stream.abort()
            await until(lambda: at.sampled)
            text = RENDERER.shown(at.sampled).strip()
            body = {"messages": [*ASKED["messages"], said(text), user("Go on.")]}
            assert (await at.post(CHAT, body))[0] == 200
            assert at.tape.starts == [0]
            begin = [*policy.given[0], *policy.sampled[0][1].token_ids[:4]]
            assert policy.given[1][: len(begin)] == begin

    asyncio.run(run())
