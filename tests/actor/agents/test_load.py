"""Laws of the agents' endpoint under the load of real harnesses, with the client of OpenAI."""

import asyncio
import json
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import aiohttp
import openai
import pytest

from actor.agents.server import AgentServer
from actor.rollout.context import Turn
from actor.rollout.episode import EnvSession, OnTokens
from tests.actor.agents.endpoint import (
    MAX_TOKENS,
    RENDERER,
    TURN_TOKENS,
    ByHeart,
    Endpoint,
    endpoint,
    new_episode,
)
from tests.actor.agents.test_repeats import Held, connected
from tests.actor.agents.test_tool_calls import LOOK, TOOL
from tests.actor.rollout.playing import LEASE

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "Which way?"}
NUM_AGENTS = 64
FAR = "far " * 2500
LONG = replace(LEASE, horizon=200)


@dataclass(slots=True)
class Unhurried(ByHeart):
    """A policy that lets other requests go first."""

    async def act(
        self, ids: list[int], session: EnvSession, /, on_tokens: OnTokens | None = None
    ) -> Turn:
        for _ in range(len(ids) % 7):
            await asyncio.sleep(0)
        return await ByHeart.act(self, ids, session, on_tokens)


async def streamed(at: Endpoint, messages: list[Any]) -> str:
    """Return the text of a stream."""
    status, answer = await at.post(CHAT, {"messages": messages, "stream": True})
    assert status == 200, answer
    events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
    return "".join(each["choices"][0]["delta"].get("content") or "" for each in events)


async def cancelled(at: Endpoint, body: dict[str, Any]) -> None:
    """Send a request and leave in the middle of its stream."""
    async with connected(at) as client:
        await client.send(CHAT, {**body, "stream": True})
        await client._reader.readexactly(20)
        client.reset()


async def play(at: Endpoint, number: int) -> None:
    """Play as a harness: two sub-agents at once, streams, a cancelled request and its repeat."""
    texts: list[str] = []

    async def sub_agent(name: str) -> None:
        history: list[Any] = [{"role": "user", "content": f"{number} {name}"}]
        for _ in range(3):
            text = await streamed(at, history)
            texts.append(text)
            history += [{"role": "assistant", "content": text}, USER]

    await asyncio.gather(sub_agent("a"), sub_agent("b"))
    body = {"messages": [{"role": "user", "content": f"{number} cancelled"}]}
    await cancelled(at, body)
    again = await streamed(at, body["messages"])
    _, both = await at.post(CHAT, {**body, "n": 2, "logprobs": True})
    assert len(both["choices"]) == 2
    texts += [again, *(each["message"]["content"] for each in both["choices"])]
    assert sorted(texts) == sorted(f"answer {each}" for each in range(9))


def test_many_agents_at_once_have_each_token_once() -> None:
    """Each policy answers with numbers: nine different ones mean nine samples, none lost."""

    async def run() -> None:
        server = AgentServer()
        await server.start()
        places: list[Endpoint] = []
        policies: list[Unhurried] = []
        async with AsyncExitStack() as stack:
            http = await stack.enter_async_context(
                aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
            )
            for number in range(NUM_AGENTS):
                policies.append(Unhurried([f"answer {each}" for each in range(9)]))
                lease = replace(LONG, episode_id=f"g/{number}")
                episode, record = new_episode(policies[-1], lease=lease)
                stack.enter_context(server.serving(episode))
                places.append(Endpoint(server=server, episode=episode, play=record, http=http))
            async with asyncio.timeout(120):
                await asyncio.gather(*(play(at, number) for number, at in enumerate(places)))
            for at, policy in zip(places, policies, strict=True):
                assert len(policy.given) == 9
                tape = at.episode.tape()
                answers = [policy.renderer.completion(f"answer {each}") for each in range(9)]
                assert sum(tape.loss_mask) == sum(len(each) + 1 for each in answers)
                trained = policy.renderer.shown([*compress(tape.token_ids, tape.loss_mask)])
                assert sorted(trained.split("<|im_end|>")[:-1]) == sorted(
                    f"answer {each}" for each in range(9)
                )
                at.episode.failed.cancel()
            assert not server.refused
        await server.close()

    asyncio.run(run())


def client_of(at: Endpoint, **how: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{at.server.url}/v1", api_key=at.episode.key, **how)


def test_timed_out_request_gets_the_first_answer_at_its_retry() -> None:
    """The client gives up after its time limit and repeats the request by itself."""

    async def run() -> None:
        policy = Held(["go left", "go right"])
        sent: list[str] = []

        async def record(request: Any) -> None:
            sent.append(request.headers["x-stainless-retry-count"])
            if len(sent) == 2:
                policy.permitted.set()

        http = openai.DefaultAsyncHttpxClient(event_hooks={"request": [record]})
        async with (
            endpoint(policy) as at,
            client_of(at, max_retries=9, timeout=1.0, http_client=http) as client,
        ):
            messages: Any = [USER]
            answer = await client.chat.completions.create(model="m", messages=messages)
            assert answer.choices[0].message.content == "go left"
            assert sent[:2] == ["0", "1"]
            assert len(policy.given) == 1
            assert at.tape.starts == [0]

    asyncio.run(run())


def test_full_context_is_reported_as_each_api_words_it() -> None:
    async def run() -> None:
        async with endpoint(ByHeart(["go"])) as at, client_of(at, max_retries=0) as client:
            far: Any = [{"role": "user", "content": FAR}]
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(model="m", messages=far)
            assert (caught.value.code, caught.value.param) == (
                "context_length_exceeded",
                "messages",
            )
            assert f"This model's maximum context length is {MAX_TOKENS} tokens" in str(
                caught.value
            )
            with pytest.raises(openai.BadRequestError, match="in your prompt"):
                await client.completions.create(model="m", prompt=FAR)
            with pytest.raises(openai.BadRequestError) as caught:
                await client.responses.create(model="m", input=FAR)
            assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
            assert "Your input exceeds the context window of this model." in str(caught.value)
            stream = await client.responses.create(model="m", input=FAR, stream=True)
            last = [event async for event in stream][-1]
            assert last.type == "response.failed"
            assert last.response.error is not None
            assert last.response.error.code == "context_length_exceeded"
            status, told = await at.post(MESSAGES, {"messages": far, "max_tokens": 5})
            assert (status, told["error"]["type"]) == (400, "invalid_request_error")
            assert told["error"]["message"].startswith("prompt is too long: ")
            assert told["error"]["message"].endswith(f"tokens > {MAX_TOKENS} maximum")
            num = 100 * (MAX_TOKENS - TURN_TOKENS // 2) // len(RENDERER.completion("a " * 100))
            near = [{"role": "user", "content": "a " * num}]
            _, told = await at.post(MESSAGES, {"messages": near, "max_tokens": 5})
            assert told["error"]["message"].startswith("input length and `max_tokens` exceed")
            assert at.server.refused == {"context_length_exceeded": 6}
            assert not at.tape.token_ids

    asyncio.run(run())


def test_token_counts_are_those_of_the_answers_prompts() -> None:
    async def run() -> None:
        policy = ByHeart(["go"])
        async with endpoint(policy) as at, client_of(at, max_retries=0) as client:
            counted = await client.responses.input_tokens.count(
                model="m", input="Which way?", instructions="Be brief."
            )
            _, by_claude = await at.post(
                f"{MESSAGES}/count_tokens", {"messages": [USER], "system": "Be brief."}
            )
            assert not policy.given
            answer = await client.responses.create(
                model="m", input="Which way?", instructions="Be brief."
            )
            assert answer.usage is not None
            assert counted.object == "response.input_tokens"
            assert counted.input_tokens == answer.usage.input_tokens == len(policy.given[0])
            assert by_claude == {"input_tokens": counted.input_tokens}
            wrong = {"messages": [{"role": "robot", "content": "x"}]}
            status, told = await at.post(f"{MESSAGES}/count_tokens", wrong)
            assert (status, told["type"]) == (400, "error")

    asyncio.run(run())


def test_policy_is_the_only_model_in_either_form() -> None:
    async def run() -> None:
        async with endpoint(ByHeart(["go"])) as at, client_of(at, max_retries=0) as client:
            assert [model.id async for model in client.models.list()] == ["policy"]
            assert (await client.models.retrieve("policy")).owned_by == "longstride"
            with pytest.raises(openai.NotFoundError) as caught:
                await client.models.retrieve("gpt-9")
            assert caught.value.code == "model_not_found"
            headers = {"x-api-key": at.episode.key, "anthropic-version": "2023-06-01"}
            async with at.http.get(f"{at.server.url}/v1/models", headers=headers) as reply:
                listed = await reply.json()
            assert listed["has_more"] is False
            assert [(each["type"], each["id"]) for each in listed["data"]] == [("model", "policy")]

    asyncio.run(run())


def test_logprobs_are_those_of_the_sampled_tokens() -> None:
    async def run() -> None:
        async with endpoint(ByHeart(["go <left>"])) as at, client_of(at) as client:
            messages: Any = [USER]
            answer = await client.chat.completions.create(
                model="m", messages=messages, logprobs=True
            )
            entries = answer.choices[0].logprobs
            assert entries is not None
            assert entries.content is not None
            assert "".join(each.token for each in entries.content) == "go <left><|im_end|>"
            assert {each.logprob for each in entries.content} == {-0.5}
            assert answer.usage is not None
            assert len(entries.content) == answer.usage.completion_tokens
            text = await client.completions.create(model="m", prompt="go", logprobs=0)
            report = text.choices[0].logprobs
            assert report is not None
            assert report.tokens is not None
            assert report.text_offset is not None
            assert report.text_offset[1] == len(report.tokens[0])
            assert "".join(report.tokens) == "go <left><|im_end|>"
            shown = await client.responses.create(
                model="m", input="go", include=["message.output_text.logprobs"]
            )
            part: Any = shown.output[0]
            assert part.content[0].logprobs[0].logprob == -0.5

    asyncio.run(run())


def test_parallel_calls_of_tools_return_in_one_answer() -> None:
    async def run() -> None:
        both = f"{LOOK}\n{LOOK.replace('up', 'down')}"
        async with endpoint(ByHeart([both, "done"])) as at, client_of(at) as client:
            messages: Any = [USER]
            tools: Any = [TOOL]
            async with client.chat.completions.stream(
                model="m", messages=messages, tools=tools
            ) as stream:
                message = (await stream.get_final_completion()).choices[0].message
            calls = message.tool_calls or []
            assert [json.loads(call.function.arguments)["where"] for call in calls] == [
                "up",
                "down",
            ]
            results: Any = [
                {"role": "tool", "tool_call_id": call.id, "content": call.id}
                for call in reversed(calls)
            ]
            history = [*messages, message.model_dump(exclude_none=True), *results]
            last = await client.chat.completions.create(model="m", messages=history, tools=tools)
            assert last.choices[0].message.content == "done"
            assert at.tape.starts == [0]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
    ],
)
def test_image_is_refused_by_its_place(path: str, body: dict[str, Any]) -> None:
    async def run() -> None:
        async with endpoint(ByHeart(["go"])) as at:
            status, told = await at.post(path, body)
            assert status == 400
            name = "input" if path == RESPONSES else "messages"
            assert f"{name}[0].content[0]" in told["error"]["message"]
            assert "image" in told["error"]["message"]
            assert not at.tape.token_ids

    asyncio.run(run())
