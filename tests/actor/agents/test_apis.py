"""Laws of the agents' endpoint in each API: captured to the token, refused by name."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from itertools import groupby
from typing import Any

import pytest

from actor.agents.http import MAX_BODY_BYTES
from actor.formats.renderer import Renderer
from common.errors import EngineError, EnvError
from common.formats.calls import as_call
from tests.actor.agents.endpoint import RENDERER, ByHeart, Endpoint, endpoint
from tests.actor.agents.test_tool_calls import LOOK, TOKENIZER, TOOL
from tests.actor.formats.test_renderer import TOKENIZERS

CHAT, BARE = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
FUNCTION = TOOL["function"]
FLAT = {"type": "function", **FUNCTION}
NAMED = {"name": "look", "description": "Look there.", "input_schema": FUNCTION["parameters"]}
USER = {"role": "user", "content": "find it"}
TEXTS = (f"I look.\n{LOOK}", "go <left>")
Program = Callable[[Endpoint], Awaitable[list[Any]]]
PROGRAMS: dict[str, Program] = {}


def speaks(program: Program) -> Program:
    PROGRAMS[program.__name__] = program
    return program


@speaks
async def chat(at: Endpoint) -> list[Any]:
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, USER]
    _, first = await at.post(CHAT, {"messages": messages, "tools": [TOOL]})
    said = first["choices"][0]["message"]
    (call,) = said["tool_calls"]
    messages += [said, {"role": "tool", "tool_call_id": call["id"], "content": "a key"}]
    _, last = await at.post(CHAT, {"messages": messages, "tools": [TOOL]})
    reasons = [each["choices"][0]["finish_reason"] for each in (first, last)]
    assert reasons == ["tool_calls", "stop"]
    function = call["function"]
    return [
        *(said["content"], function["name"], json.loads(function["arguments"])),
        last["choices"][0]["message"]["content"],
    ]


async def _responses(at: Endpoint, *, by_id: bool) -> list[Any]:
    how = {"instructions": "Be brief.", "tools": [FLAT], "model": "policy"}
    _, first = await at.post(RESPONSES, {**how, "input": "find it"})
    text, call = first["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "a key"}
    more: dict[str, Any] = {"input": [USER, text, call, result]}
    if by_id:
        more = {"input": [result], "previous_response_id": first["id"]}
    _, last = await at.post(RESPONSES, {**how, **more})
    assert (first["status"], last["status"]) == ("completed", "completed")
    return [
        *(text["content"][0]["text"], call["name"], json.loads(call["arguments"])),
        last["output"][0]["content"][0]["text"],
    ]


@speaks
async def responses(at: Endpoint) -> list[Any]:
    return await _responses(at, by_id=False)


@speaks
async def responses_by_id(at: Endpoint) -> list[Any]:
    return await _responses(at, by_id=True)


@speaks
async def messages(at: Endpoint) -> list[Any]:
    how = {"system": [{"type": "text", "text": "Be brief."}], "tools": [NAMED], "max_tokens": 200}
    _, first = await at.post(MESSAGES, {**how, "messages": [USER]})
    text, call = first["content"]
    content = [{"type": "text", "text": "a key"}]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": content}
    history = [USER, {"role": "assistant", "content": [text, call]}]
    history.append({"role": "user", "content": [result]})
    _, last = await at.post(MESSAGES, {**how, "messages": history})
    assert (first["stop_reason"], last["stop_reason"]) == ("tool_use", "end_turn")
    return [text["text"], call["name"], call["input"], last["content"][0]["text"]]


@pytest.mark.parametrize("name", PROGRAMS)
def test_sampled_tokens_are_kept_in_every_api(name: str) -> None:
    async def run() -> None:
        policy = ByHeart(TEXTS)
        async with endpoint(policy) as at:
            got = await PROGRAMS[name](at)
            assert got == ["I look.", "look", {"where": "up"}, "go <left>"]
            assert at.tape.starts == [0]  # no new segment: the calls were known again
            sampled = at.sampled
            assert TOKENIZER.decode(sampled) == "".join(f"{text}<|im_end|>" for text in TEXTS)
            assert not at.server.refused
        history: list[Any] = [{"role": "system", "content": "Be brief."}, USER]
        assert policy.given[0] == RENDERER.of_messages(history, tools=[TOOL])
        call = as_call("look", {"where": "up"})
        history.append({"role": "assistant", "content": "I look.", "tool_calls": [call]})
        history.append({"role": "tool", "content": "a key"})
        assert policy.given[1] == RENDERER.of_messages(history, tools=[TOOL])

    asyncio.run(run())


def test_nonstandard_tool_call_keeps_its_sampled_tokens() -> None:
    """Rendered again it would be other tokens: spaces, the order of keys."""
    odd = '<tool_call>{"arguments":{"where":   "up"},"name":"look"}</tool_call>'

    async def run() -> None:
        policy = ByHeart([odd, "ok"])
        async with endpoint(policy) as at:
            assert (await chat(at))[1:3] == ["look", {"where": "up"}]
            assert at.tape.starts == [0]
            assert odd in TOKENIZER.decode(policy.given[1])

    asyncio.run(run())


def test_changed_tools_or_history_start_new_segment() -> None:
    other = {**TOOL, "function": {**FUNCTION, "name": "listen"}}

    async def run() -> None:
        async with endpoint(ByHeart(TEXTS)) as at:
            _, first = await at.post(CHAT, {"messages": [USER], "tools": [TOOL]})
            said = first["choices"][0]["message"]
            asked = [USER, said, {"role": "tool", "content": "a key"}]
            assert (await at.post(CHAT, {"messages": asked, "tools": [TOOL, other]}))[0] == 200
            assert len(at.tape.starts) == 2
            said["tool_calls"][0]["function"]["arguments"] = '{"where": "down"}'
            assert (await at.post(CHAT, {"messages": asked, "tools": [TOOL, other]}))[0] == 200
            assert len(at.tape.starts) == 3

    asyncio.run(run())


@pytest.mark.parametrize("is_streamed", [False, True])
def test_call_before_a_stop_text_is_a_call(is_streamed: bool) -> None:
    async def run() -> None:
        async with endpoint(ByHeart([f"I look.\n{LOOK}\nObservation: a wall"])) as at:
            body: dict[str, Any] = {"tools": [NAMED], "stop_sequences": ["\nObs"]}
            body |= {"messages": [USER], "max_tokens": 200, "stream": is_streamed}
            _, got = await at.post(MESSAGES, body)
            if is_streamed:
                assert "input_json_delta" in got
                assert '"stop_reason": "tool_use", "stop_sequence": "\\nObs"' in got
                return
            text, call = got["content"]
            assert (text["text"], call["name"]) == ("I look.", "look")
            assert (got["stop_reason"], got["stop_sequence"]) == ("tool_use", "\nObs")
            result = {"type": "tool_result", "tool_use_id": call["id"], "content": "a key"}
            answer = {"role": "assistant", "content": got["content"]}
            body["messages"] += [answer, {"role": "user", "content": [result]}]
            assert (await at.post(MESSAGES, body))[0] == 200
            assert at.tape.starts == [0]

    asyncio.run(run())


def test_stop_text_ends_answer_at_completing_token() -> None:
    text = "go north\nObservation: a wall"

    async def run() -> None:
        async with endpoint(ByHeart([text])) as at:
            body = {"messages": [USER], "stop": ["\nObs", "never", "\nObse"]}
            _, got = await at.post(CHAT, body)
            choice = got["choices"][0]
            assert (choice["message"]["content"], choice["finish_reason"]) == ("go north", "stop")
            sampled = at.sampled
            assert sampled == TOKENIZER.encode(text, add_special_tokens=False)[: len(sampled)]
            assert "\nObs" in TOKENIZER.decode(sampled)
            assert "\nObs" not in TOKENIZER.decode(sampled[:-1])
            after = [USER, choice["message"], {"role": "user", "content": "on"}]
            assert (await at.post(CHAT, {"messages": after}))[0] == 200
            assert at.tape.starts == [0]
            body = {"messages": [USER], "stop_sequences": ["wall"], "max_tokens": 200}
            _, got = await at.post(MESSAGES, body)
            assert (got["stop_reason"], got["stop_sequence"]) == ("stop_sequence", "wall")

    asyncio.run(run())


def bad(field: str, value: object) -> list[tuple[str, dict[str, Any]]]:
    """Return requests of all APIs that differ from good ones in a field."""
    good: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"messages": [USER]}),
        (BARE, {"prompt": "go"}),
        (RESPONSES, {"input": "go"}),
        (MESSAGES, {"messages": [USER], "max_tokens": 9}),
    ]
    return [(path, {**body, field: value}) for path, body in good]


IMAGE = [{"type": "image", "source": {}}]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *((*each, "unknown_parameter") for each in bad("frobnicate", 1)),
    *((*each, "invalid_value") for each in bad("stream", "yes")),
    (
        CHAT,
        {"messages": [USER], "tools": [TOOL], "tool_choice": "required"},
        "unsupported_parameter",
    ),
    (
        CHAT,
        {"messages": [USER], "response_format": {"type": "json_object"}},
        "unsupported_parameter",
    ),
    (CHAT, {"messages": [USER], "tools": [{"type": "web_search"}]}, "unsupported_parameter"),
    (CHAT, {"messages": [USER], "tools": ["look"]}, "invalid_value"),
    (CHAT, {"messages": [USER], "tools": [{"type": "function", "function": {}}]}, "invalid_value"),
    (CHAT, {"messages": [USER], "stop": [5]}, "invalid_value"),
    (CHAT, {"messages": [USER], "top_logprobs": 3}, "unsupported_parameter"),
    (CHAT, {"messages": [{"role": "user", "content": IMAGE}]}, "invalid_value"),
    (
        CHAT,
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "x", "arguments": "{"}}],
                },
                USER,
            ]
        },
        "invalid_value",
    ),
    (BARE, {"prompt": "go", "echo": True}, "unsupported_parameter"),
    (BARE, {"prompt": ""}, "invalid_value"),
    (RESPONSES, {"input": []}, "invalid_value"),
    (RESPONSES, {"input": [{"type": "reasoning", "summary": []}]}, "invalid_value"),
    (RESPONSES, {"input": "go", "background": True}, "unsupported_parameter"),
    (RESPONSES, {"input": "go", "conversation": "c"}, "unsupported_parameter"),
    (RESPONSES, {"input": "go", "previous_response_id": "x"}, "previous_response_not_found"),
    (RESPONSES, {"input": "go", "tools": [{"type": "file_search"}]}, "unsupported_parameter"),
    (RESPONSES, {"input": "far " * 4000}, "context_length_exceeded"),
    (MESSAGES, {"messages": [USER], "max_tokens": 0}, "invalid_value"),
    (MESSAGES, {"messages": [{"role": "system", "content": "x"}]}, "invalid_value"),
    (MESSAGES, {"messages": [{"role": "user", "content": IMAGE}]}, "invalid_value"),
    (MESSAGES, {"messages": [USER], "thinking": {"type": "enabled"}}, "unsupported_parameter"),
    (MESSAGES, {"messages": [USER], "tool_choice": {"type": "any"}}, "unsupported_parameter"),
    (f"{MESSAGES}/batches", {}, "not_found"),
]


def code_of(path: str, told: dict[str, Any]) -> str:
    """Return an error's code; the shape is the API's own."""
    if not path.startswith(MESSAGES):
        assert told["error"]["message"]
        return told["error"]["code"]
    assert told["type"] == "error"
    assert told["error"]["type"].endswith(("_error", "too_large"))
    return told["error"]["message"].partition(":")[0]


def test_bad_requests_have_no_side_effects() -> None:
    async def run() -> None:
        async with endpoint(ByHeart(TEXTS)) as at:
            for path, body, code in REFUSED:
                status, told = await at.post(path, body)
                assert status == (404 if code == "not_found" else 400), (path, body, told)
                assert code_of(path, told) == code, (path, body, told)
            for path in (CHAT, BARE, RESPONSES, MESSAGES):
                nested = b'{"messages": ' + b"[" * 100_000
                long = b'{"messages": "' + b"x" * MAX_BODY_BYTES + b'"}'
                for raw, code in [
                    (b'{"messages": [', "invalid_body"),
                    (b"[]", "invalid_body"),
                    (b"\xff", "invalid_body"),
                    (nested, "invalid_body"),
                    (long, "request_entity_too_large"),
                ]:
                    status, told = await at.post(path, raw)
                    assert (status, code_of(path, told)) == (413 if raw is long else 400, code)
                status, told = await at.post(path, {}, key="wrong")
                assert (status, code_of(path, told)) == (401, "invalid_api_key")
                assert at.episode.refused.total() < at.server.refused.total()
            assert at.server.refused.total() == len(REFUSED) + 4 * 6
            assert not at.tape.token_ids
            assert not at.episode.failed.done()
        assert len(long) > MAX_BODY_BYTES

    asyncio.run(run())


def test_incomplete_body_is_counted_and_fails_nothing() -> None:
    async def run() -> None:
        async with endpoint(ByHeart(TEXTS)) as at:
            host, _, port = at.server.url.removeprefix("http://").partition(":")
            _, writer = await asyncio.open_connection(host, int(port))
            head = f"POST {MESSAGES} HTTP/1.1\r\nHost: x\r\nx-api-key: {at.episode.key}\r\n"
            writer.write(f'{head}Content-Length: 900\r\n\r\n{{"messages": ['.encode())
            await writer.drain()
            await asyncio.sleep(0.2)
            writer.close()
            await writer.wait_closed()
            async with asyncio.timeout(20):
                while not at.episode.refused:
                    await asyncio.sleep(0.02)
            assert dict(at.episode.refused) == {"incomplete_body": 1}
            assert not at.episode.failed.done()
            assert (await at.post(CHAT, {"messages": [USER]}))[0] == 200

    asyncio.run(run())


def test_unsupported_tools_are_refused_in_every_api() -> None:
    async def run() -> None:
        async with endpoint(ByHeart(["x"]), Renderer(TOKENIZERS["chatml"])) as at:
            for path, body in [
                (CHAT, {"messages": [USER], "tools": [TOOL]}),
                (RESPONSES, {"input": "go", "tools": [FLAT]}),
                (RESPONSES, {"input": [{"type": "function_call_output", "output": "x"}]}),
                (MESSAGES, {"messages": [USER], "tools": [NAMED]}),
            ]:
                status, told = await at.post(path, body)
                assert (status, code_of(path, told)) == (400, "unsupported_parameter")
                assert "does not render the tools of a prompt" in told["error"]["message"]
            assert not at.tape.token_ids
            none = {"messages": [USER], "tools": [TOOL], "tool_choice": "none"}
            assert (await at.post(CHAT, none, header="x-api-key"))[0] == 200

    asyncio.run(run())


PATCH = '<tool_call>{"name": "patch", "arguments": {"input": "+ a line"}}</tool_call>'


def test_call_of_a_plain_text_tool_returns_in_its_form() -> None:
    """The client finds the call by its type, and repeats it in the history."""

    async def run() -> None:
        async with endpoint(ByHeart([PATCH, "ok"])) as at:
            tools: list[Any] = [{"type": "custom", "custom": {"name": "patch"}}]
            _, first = await at.post(CHAT, {"messages": [USER], "tools": tools})
            message = first["choices"][0]["message"]
            (call,) = message["tool_calls"]
            assert (call["type"], call["custom"]) == (
                "custom",
                {"name": "patch", "input": "+ a line"},
            )
            result = {"role": "tool", "tool_call_id": call["id"], "content": "done"}
            body = {"messages": [USER, message, result], "tools": tools}
            assert (await at.post(CHAT, body))[0] == 200
            assert at.tape.starts == [0]
        async with endpoint(ByHeart([PATCH, "ok"])) as at:
            tools = [{"type": "custom", "name": "patch", "format": {"type": "text"}}]
            _, first = await at.post(RESPONSES, {"input": "go", "tools": tools})
            (call,) = first["output"]
            assert (call["type"], call["name"], call["input"]) == (
                *("custom_tool_call", "patch", "+ a line"),
            )
            result = {
                "type": "custom_tool_call_output",
                "call_id": call["call_id"],
                "output": "done",
            }
            body = {"input": [{**USER, "content": "go"}, call, result], "tools": tools}
            assert (await at.post(RESPONSES, body))[0] == 200
            assert at.tape.starts == [0]
            _, stream = await at.post(RESPONSES, {"input": "go", "tools": tools, "stream": True})
            assert "response.completed" in stream

    asyncio.run(run())


def test_call_of_a_tool_in_a_namespace_names_it() -> None:
    tools = [{"type": "namespace", "name": "eyes", "tools": [FLAT]}]

    async def run() -> None:
        async with endpoint(ByHeart([LOOK])) as at:
            _, told = await at.post(RESPONSES, {"input": "go", "tools": tools})
            (call,) = told["output"]
            assert (call["name"], call["namespace"]) == ("look", "eyes")
            _, told = await at.post(RESPONSES, {"input": "go", "tools": [FLAT, *tools]})
            assert "two tools have the name look" in told["error"]["message"]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("error", "named", "code"),
    [
        (KeyError("slot 7"), "KeyError: 'slot 7'", "policy_failed"),
        (EngineError("engine died"), "engine died", "policy_failed"),
        (EnvError("worker died"), "worker died", "environment_failed"),
    ],
)
def test_unexpected_error_fails_the_episode_by_name(
    error: Exception, named: str, code: str
) -> None:
    async def run() -> None:
        async with endpoint(ByHeart([error])) as at:
            for path, body in bad("user", "x"):
                status, told = await at.post(path, body)
                is_first = path == CHAT
                expected = (503, code) if is_first else (410, "episode_ended")
                assert (status, code_of(path, told)) == expected
            assert named in str(at.episode.failed.exception())
            assert at.episode.refused == {code: 1, "episode_ended": 3}

    asyncio.run(run())


def events_of(stream: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for block in stream.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        found.append((fields.get("event", ""), fields["data"]))
    return found


def kinds_of(events: list[Any]) -> list[Any]:
    """Return consecutive events of one kind as one."""
    return [kind for kind, _ in groupby(events)]


def test_streams_emit_their_api_events_in_order() -> None:
    async def run() -> None:
        async with endpoint(ByHeart([TEXTS[0]])) as at:
            body = {"messages": [USER], "tools": [TOOL], "stream": True}
            _, reply = await at.post(CHAT, {**body, "stream_options": {"include_usage": True}})
            *chunks, done = [data for _, data in events_of(reply)]
            assert done == "[DONE]"
            *parts, usage = map(json.loads, chunks)
            deltas = [list(part["choices"][0]["delta"]) for part in parts]
            assert kinds_of(deltas) == [["role", "content"], ["content"], ["tool_calls"], []]
            assert (usage["choices"], usage["usage"]["completion_tokens"] > 9) == ([], True)
            _, reply = await at.post(RESPONSES, {"input": "go", "tools": [FLAT], "stream": True})
            events = events_of(reply)
            assert kinds_of([name.removeprefix("response.") for name, _ in events]) == [
                *("created", "in_progress", "output_item.added", "content_part.added"),
                *("output_text.delta", "output_text.done", "content_part.done"),
                *("output_item.done", "output_item.added", "function_call_arguments.delta"),
                *("function_call_arguments.done", "output_item.done", "completed"),
            ]
            numbers = [json.loads(data)["sequence_number"] for _, data in events]
            assert numbers == list(range(len(events)))
            how = {"messages": [USER], "tools": [NAMED], "max_tokens": 99, "stream": True}
            _, reply = await at.post(MESSAGES, how)
            block = [f"content_block_{kind}" for kind in ("start", "delta", "stop")]
            names = ["message_start", *block, *block, "message_delta", "message_stop"]
            assert kinds_of([name for name, _ in events_of(reply)]) == names
            status, reply = await at.post(MESSAGES, {**how, "messages": []})
            assert (status, code_of(MESSAGES, reply)) == (400, "invalid_value")

    asyncio.run(run())
