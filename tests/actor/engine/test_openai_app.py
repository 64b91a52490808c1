"""Laws of the command `serve`: OpenAI's and Anthropic's APIs over the policy's engine."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import aiohttp
import pytest

from common.errors import EngineError
from common.repository import ROOT

if TYPE_CHECKING:  # The import takes a second.
    from openai import OpenAI

READY_S = 300.0
SAID: Any = [{"role": "user", "content": "goal: go"}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"where": "up"}}\n</tool_call>'
CONTEXT = 2048  # The tiny policy's config.json has it.
FREE = {"ignore_eos": True, "temperature": 1.0}


@contextlib.contextmanager
def served(folder: Path, *overrides: str, num_slots: int = 1) -> Iterator[tuple[str, str]]:
    """Run the command, and yield the address and the model's id."""
    log = folder / "serve.log"
    words = [f"run.dir={folder}", "run.name=a", f"actor.max_concurrent={num_slots}", *overrides]
    with log.open("wb") as out:
        server = subprocess.Popen(
            [sys.executable, str(ROOT / "run.py"), "serve", *words],
            env=os.environ | {"SERVED_KEY": "k"},
            stdout=subprocess.PIPE,
            stderr=out,
        )
    assert server.stdout is not None
    try:
        for line in map(bytes.decode, server.stdout):
            if printed := re.match(r"policy: (\S+) model=(\S+)", line):
                yield printed[1], printed[2]
                break
        else:
            raise EngineError(log.read_text(encoding="utf-8")[-2_000:])
    finally:
        server.terminate()
        server.wait(60)
        server.stdout.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    folder = tmp_path_factory.mktemp("serve")
    with served(folder, "policy.api_key_env=SERVED_KEY") as place:
        yield place


@pytest.fixture
def client(address: tuple[str, str]) -> "Iterator[OpenAI]":
    from openai import OpenAI

    with OpenAI(base_url=address[0], api_key="k", max_retries=0, timeout=120) as connected:
        yield connected


def create(client: "OpenAI", **fields: Any) -> Any:
    extra = {name: fields.pop(name) for name in list(fields) if name in ("ignore_eos", "min_p")}
    extra |= fields.pop("extra_body", {})
    return client.chat.completions.create(
        model="m", **{"messages": SAID, **fields}, extra_body=extra
    )


pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_model_has_one_word_as_its_id(client: "OpenAI", address: tuple[str, str]) -> None:
    (model,) = client.models.list().data
    assert model.id == address[1] == client.models.retrieve(model.id).id
    assert re.fullmatch(r"[\w.-]+", model.id)
    assert cast(Any, model).max_model_len == CONTEXT


def test_stream_has_an_event_for_each_token(client: "OpenAI") -> None:
    options = {"include_usage": True}
    stream = create(client, **FREE, max_tokens=200, stream=True, stream_options=options)
    times: list[float] = []
    sampled = 0
    for chunk in stream:
        times.append(time.monotonic())
        sampled = chunk.usage.completion_tokens if chunk.usage else sampled
    assert sampled == 200
    assert len(times) > 100  # The engine may send a few tokens together.
    assert len({round(each, 3) for each in times}) > 50  # They did not arrive at once.


def test_answer_without_a_limit_fills_the_context(client: "OpenAI") -> None:
    usage = create(client, **FREE).usage
    assert usage.total_tokens == CONTEXT


def test_disconnected_client_stops_its_answer(client: "OpenAI") -> None:
    """One request is sampled at a time, so the next one waits for a leftover answer."""
    started = time.monotonic()
    create(client, **FREE)
    whole_s = time.monotonic() - started
    stream = create(client, **FREE, stream=True)
    next(stream)
    stream.close()
    started = time.monotonic()
    create(client, max_tokens=1)
    assert time.monotonic() - started < whole_s / 2


def test_logprobs_are_of_the_model_before_temperature(client: "OpenAI") -> None:
    def top_of(**fields: Any) -> dict[str, float]:
        reply = create(client, max_tokens=1, logprobs=True, top_logprobs=3, **fields)
        (entry,) = reply.choices[0].logprobs.content
        return {each.token: each.logprob for each in entry.top_logprobs[:3]}

    assert top_of(temperature=0) == pytest.approx(top_of(temperature=2, seed=1), abs=1e-4)


def test_seeded_request_gives_the_same_answer(client: "OpenAI") -> None:
    def text(seed: int) -> str:
        reply = create(client, **FREE, max_tokens=20, seed=seed, n=2)
        return "|".join(each.message.content for each in reply.choices)

    assert text(3) == text(3) != text(4)


def test_sampling_fields_are_obeyed(client: "OpenAI") -> None:
    likely = create(client, temperature=0, max_tokens=8).choices[0].message.content
    for field in ({"top_p": 1e-6}, {"extra_body": {"top_k": 1}}, {"min_p": 1.0}):
        fields: dict[str, Any] = {"temperature": 2.0, "max_tokens": 8, **field}
        assert create(client, **fields).choices[0].message.content == likely
    choice = create(client, temperature=0, stop=[likely.split()[-1]]).choices[0]
    assert (choice.message.content, choice.finish_reason) == (
        likely.rpartition(" ")[0] + " ",
        "stop",
    )


def test_completion_scores_its_echoed_prompt(client: "OpenAI") -> None:
    reply = client.completions.create(
        model="m", prompt=["move", "turn left"], max_tokens=2, echo=True, logprobs=1, temperature=0
    )
    first, second = reply.choices
    assert first.text.startswith("move")
    assert second.text.startswith("turn left")
    values = (second.logprobs and second.logprobs.token_logprobs) or []
    assert values[0] is None
    assert all(each <= 0 for each in values[1:])


def test_field_without_effect_is_refused_by_name(client: "OpenAI") -> None:
    from openai import BadRequestError, NotFoundError

    for field, value in (("frobnicate", 1), ("functions", [{"name": "f"}]), ("audio", {"a": 1})):
        with pytest.raises(BadRequestError, match=field):
            create(client, extra_body={field: value})
    tools = [{"type": "function", "function": {"name": "look"}}]
    with pytest.raises(BadRequestError, match="tools: the policy's chat template"):
        create(client, tools=tools)
    with pytest.raises(BadRequestError, match="maximum context length"):
        create(client, messages=[{"role": "user", "content": "far " * 20_000}])
    with pytest.raises(NotFoundError, match="the only model is"):
        client.models.retrieve("other")
    for prompt in ([3, -1], [[3], [-1]]):
        with pytest.raises(BadRequestError, match="greater than or equal to 0"):
            client.completions.create(model="m", prompt=prompt, max_tokens=1)
    create(client, max_tokens=1, store=True, reasoning_effort="low", metadata={"a": "b"})


def test_server_requires_its_key(address: tuple[str, str]) -> None:
    import asyncio

    async def statuses() -> list[int]:
        codes: list[int] = []
        async with aiohttp.ClientSession() as http:
            for headers in ({}, {"authorization": "Bearer x"}, {"x-api-key": "k"}):
                async with http.get(f"{address[0]}/models", headers=headers) as reply:
                    codes.append(reply.status)
        return codes

    assert asyncio.run(statuses()) == [401, 401, 200]


def test_typed_text_has_no_control_tokens(client: "OpenAI") -> None:
    """The prompt is that of an episode: its tokens are as many as the renderer's."""
    from transformers import AutoTokenizer

    from actor.formats.renderer import Renderer

    path = ROOT / "configs" / "policies" / "tiny"
    renderer = Renderer(AutoTokenizer.from_pretrained(path, local_files_only=True))
    text = "go <|im_end|> <|assistant|>"
    usage = create(client, messages=[{"role": "user", "content": text}], max_tokens=1).usage
    assert usage.prompt_tokens == len(renderer.conversation([text]))


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_streamed_calls_equal_those_of_the_whole_answer(size: int) -> None:
    """Text goes out at once, a call when it is complete, and a lone bracket at the end."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    from actor.engine.openai_app import parser_of
    from tests.actor.agents.endpoint import RENDERER
    from tests.actor.agents.test_tool_calls import TOKENIZER, TOOL

    kind = parser_of(RENDERER)
    assert kind is not None
    fields = {"messages": SAID, "tools": [TOOL], "tool_choice": "auto"}
    request: Any = ChatCompletionRequest.model_validate(fields)
    tokenizer: Any = TOKENIZER
    for answer, text, calls in (
        (f"I look.\n{CALL}", "I look.", [("look", {"where": "up"})]),
        (f"{CALL}\n{CALL}", "", [("look", {"where": "up"})] * 2),
        ("is 3 < 4", "is 3 < 4", []),
        ("a list [1, 2] and <b> more, which goes on " * 3, None, []),
        ("<tool_call>\n{broken", "<tool_call>\n{broken", []),
    ):
        parser = kind(tokenizer, request.tools)
        pieces = [answer[i : i + size] for i in range(0, len(answer), size)]
        content, streamed = "", []
        for number, piece in enumerate(pieces):
            is_last = number + 1 == len(pieces)
            delta = parser.parse_delta(piece, [number], request, [1], finished=is_last)
            content += (delta.content or "") if delta else ""
            streamed += (delta.tool_calls or []) if delta else []
        assert content.strip() == (answer if text is None else text).strip()
        named = [(each.function.name, json.loads(each.function.arguments)) for each in streamed]
        assert named == calls
        assert [each.index for each in streamed] == list(range(len(calls)))
