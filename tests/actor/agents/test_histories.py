"""Laws of histories that an agent has written itself: thoughts, results, unknown fields."""

import asyncio
from typing import Any

import pytest

from actor.api.chat_api import CHAT_API
from actor.api.requests import ApiError
from actor.formats.renderer import Renderer
from common.formats.calls import as_call
from common.formats.chat_template import render_chat
from tests.actor.agents.endpoint import ByHeart, endpoint
from tests.actor.agents.test_tool_calls import TOOL, TOOLS_TEMPLATE
from tests.actor.formats.trl_templates import byte_tokenizer

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SPECIAL = ["<|im_start|>"]
PLAIN = byte_tokenizer(TOOLS_TEMPLATE, eos="<|im_end|>", special=SPECIAL)
# All answers show their thoughts, in the field FIELD.
SHOWN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.FIELD %}<think>\n{{ m.FIELD }}\n"
    "</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Gemma 4's: a result has the name of its tool.
NAMED = TOOLS_TEMPLATE.replace(
    "'\\n<tool_response>\\n' + message.content",
    "'\\n<tool_response>\\n' + message.name + message.content",
)
USER = {"role": "user", "content": "Which way?"}
ON = {"role": "user", "content": "a wall"}
THOUGHT = "<think>\nLeft?\n</think>\n\n"


def thinking(field: str = "reasoning_content") -> Any:
    return byte_tokenizer(SHOWN.replace("FIELD", field), eos="<|im_end|>", special=SPECIAL)


def said(**more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "go left", **more}


def ids_of(tokenizer: Any, messages: list[dict[str, Any]], **more: Any) -> list[int]:
    return tokenizer.encode(render_chat(tokenizer, messages, **more), add_special_tokens=False)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_of_a_history_are_shown_by_the_template(field: str) -> None:
    tokenizer = thinking(field)
    policy = ByHeart(["go"], renderer=Renderer(tokenizer))

    async def run() -> None:
        async with endpoint(policy) as at:
            for given in ("reasoning_content", field):
                body = {"messages": [USER, said(**{given: "Left?"}), ON]}
                assert (await at.post(CHAT, body))[0] == 200

    asyncio.run(run())
    shown = ids_of(tokenizer, [USER, said(**{field: "Left?"}), ON])
    assert policy.given == [shown, shown]
    assert THOUGHT in tokenizer.decode(shown)


def test_thoughts_that_no_template_shows_are_left_out() -> None:
    policy = ByHeart([f"{THOUGHT}go left"], renderer=Renderer(PLAIN))

    async def run() -> None:
        async with endpoint(policy) as at:
            body = {"messages": [USER, said(reasoning_content="Left?"), ON]}
            assert (await at.post(CHAT, body))[0] == 200
            _, first = await at.post(CHAT, {"messages": [USER]})
            own = first["choices"][0]["message"]
            assert own["reasoning_content"] == "Left?"
            assert (await at.post(CHAT, {"messages": [ON, USER, own, ON]}))[0] == 200
            body = {"messages": [USER, said(reasoning_content=["Left?"]), ON]}
            _, told = await at.post(CHAT, body)
            assert told["error"]["message"] == "messages[1].reasoning_content: must be text"

    asyncio.run(run())
    assert policy.given[0] == ids_of(PLAIN, [USER, said(), ON])


def test_returned_thoughts_keep_the_sampled_tokens() -> None:
    tokenizer = thinking()
    policy = ByHeart([f"{THOUGHT}go left"], renderer=Renderer(tokenizer))

    async def run() -> None:
        async with endpoint(policy) as at:
            _, first = await at.post(CHAT, {"messages": [USER]})
            own = first["choices"][0]["message"]
            bare = {"role": "assistant", "content": "go left"}
            for history in ([USER, own, ON], [USER, own, ON, bare, ON]):
                assert (await at.post(CHAT, {"messages": history}))[0] == 200
            assert at.tape.starts == [0]
            other = [USER, own, ON, bare, ON, {**own, "reasoning_content": "Right?"}, ON]
            assert (await at.post(CHAT, {"messages": other}))[0] == 200
            assert len(at.tape.starts) == 2

    asyncio.run(run())
    assert tokenizer.decode(policy.given[2]).count("Left?") == 2
    assert "Right?" in tokenizer.decode(policy.given[3])


def test_results_have_the_order_and_names_of_their_calls() -> None:
    tokenizer = byte_tokenizer(NAMED, eos="<|im_end|>", special=SPECIAL)
    other = {"type": "function", "function": {**TOOL["function"], "name": "listen"}}
    tools = [TOOL, other]
    policy = ByHeart(["go"], renderer=Renderer(tokenizer))
    calls = [{**as_call(name, {}), "id": name[0]} for name in ("look", "listen")]
    results = [("b", "silence"), ("l", "a key")]
    calls[1]["id"] = "b"
    chat: list[Any] = [USER, said(tool_calls=calls)]
    chat += [{"role": "tool", "tool_call_id": i, "content": text} for i, text in results]
    used = [
        {"type": "tool_use", "id": i, "name": n, "input": {}}
        for i, n in (("l", "look"), ("b", "listen"))
    ]
    answered = [{"type": "tool_result", "tool_use_id": i, "content": text} for i, text in results]
    claude = [USER, said(content=[{"type": "text", "text": "go left"}, *used])]
    claude.append({"role": "user", "content": answered})
    named = [
        {"name": n, "input_schema": TOOL["function"]["parameters"], "description": "Look there."}
        for n in ("look", "listen")
    ]

    async def run() -> None:
        async with endpoint(policy) as at:
            assert (await at.post(CHAT, {"messages": chat, "tools": tools}))[0] == 200
            body = {"messages": claude, "tools": named, "max_tokens": 9}
            assert (await at.post(MESSAGES, body))[0] == 200
            chat[-1]["tool_call_id"] = "x"
            status, told = await at.post(CHAT, {"messages": chat, "tools": tools})
            assert status == 400
            assert told["error"]["message"].startswith("messages: tool_call_id='x': the answer")

    asyncio.run(run())
    shown = tokenizer.decode(policy.given[0])
    assert "looka key\n</tool_response>\n<tool_response>\nlistensilence" in shown
    assert policy.given[1] == policy.given[0]


def test_unknown_field_of_a_message_is_refused_by_name() -> None:
    async def run() -> None:
        async with endpoint(ByHeart(["go"], renderer=Renderer(PLAIN))) as at:
            for field in ("frobnicate", "prefix", "refusal"):
                status, told = await at.post(CHAT, {"messages": [{**USER, field: "x"}]})
                assert status == 400
                assert told["error"]["message"] == f"Unknown parameter: messages[0].{field}"
            harmless = {"name": "a", "annotations": [], "refusal": None, "audio": None}
            assert (await at.post(CHAT, {"messages": [{**USER, **harmless}]}))[0] == 200

    asyncio.run(run())


def result_of(call: str, role: str = "tool") -> dict[str, Any]:
    return {"role": role, "content": "a key", "tool_call_id": call}


CALLED = {**as_call("look", {}), "id": "c"}


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([USER, result_of("c")], "messages: tool_call_id='c': the answer before it has no calls"),
        (
            [USER, said(), result_of("c")],
            "messages: tool_call_id='c': the answer before it has no calls",
        ),
        (
            [USER, said(tool_calls=[CALLED]), result_of("x")],
            "messages: tool_call_id='x': the answer before it has no such call; it has c",
        ),
        (
            [result_of("c", role="user")],
            "messages[0].tool_call_id: only a message of role tool is the result of a call",
        ),
    ],
)
def test_result_of_an_unknown_call_is_refused_by_name(messages: list[Any], text: str) -> None:
    async def run() -> None:
        async with endpoint(ByHeart(["go"], renderer=Renderer(PLAIN))) as at:
            status, told = await at.post(CHAT, {"messages": messages, "tools": [TOOL]})
            assert (status, told["error"]["message"]) == (400, text)
            known = [USER, said(tool_calls=[CALLED]), USER, result_of("c")]
            assert (await at.post(CHAT, {"messages": known, "tools": [TOOL]}))[0] == 200

    asyncio.run(run())


def test_thinking_blocks_of_litellm_are_thoughts() -> None:
    blocks = [
        {"type": "thinking", "thinking": "Left?", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
    ]

    def thoughts(**fields: Any) -> str:
        asked = CHAT_API.read({"messages": [USER, said(**fields), USER]})
        return asked.messages[1].get("reasoning_content", "")

    assert thoughts(thinking_blocks=blocks) == "Left?"
    assert thoughts(thinking_blocks=blocks, reasoning_content="Right?") == "Right?"
    assert thoughts(thinking_blocks=[]) == ""
    with pytest.raises(ApiError, match=r"messages\[1\]\.thinking_blocks: the field thinking must"):
        thoughts(thinking_blocks=[{"type": "thinking"}])
