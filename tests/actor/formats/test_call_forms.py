"""Laws of calls of tools in the form of any chat template, for our own loop and for agents."""

import asyncio
import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from actor.formats.renderer import Renderer, with_ids
from common.formats.calls import CallForm, as_call
from tests.actor.agents.endpoint import ByHeart, endpoint
from tests.actor.formats.templates import CALLERS

ANY_CALLER = pytest.mark.parametrize("name", CALLERS)
USER = {"role": "user", "content": "find it"}
FIELDS = {"where": {"type": "string"}, "far": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look there.",
        "parameters": {"type": "object", "properties": FIELDS},
    },
}
WAYS: list[dict[str, Any]] = [{"where": "up", "far": 3}, {"where": 'say\n "<b>" {'}, {}]
HAS_ONE = ("llama",)  # one call in a turn
SAYS_NOTHING = ("llama", "mistral")  # beside calls


def written(tokenizer: PreTrainedTokenizerFast, calls: list[dict[str, Any]], said: str) -> str:
    """Return what a template writes for an answer, without the end of its turn."""
    answer = {"role": "assistant", "content": said, "tool_calls": calls}
    first, whole = (
        tokenizer.apply_chat_template(
            with_ids(each), tools=[TOOL], tokenize=False, add_generation_prompt=is_first
        )
        for each, is_first in (([USER], True), ([USER, answer], False))
    )
    assert isinstance(first, str)
    assert isinstance(whole, str)
    assert whole.startswith(first)
    return whole.removeprefix(first).rstrip("\n").removesuffix(str(tokenizer.eos_token))


@ANY_CALLER
def test_tool_calls_survive_a_template_round_trip(name: str) -> None:
    tokenizer, renderer = CALLERS[name], Renderer(CALLERS[name])
    for said in ("", "I look."):
        for ways in ([each] for each in WAYS) if name in HAS_ONE else ([WAYS[0]], WAYS):
            calls = [as_call("look", each) for each in ways]
            text = written(tokenizer, calls, said)
            told = "" if name in SAYS_NOTHING else said
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert renderer.read_answer(ids, [TOOL]) == (told, calls)
            ended = [*ids, renderer.end_of_turn_ids[0]]
            assert renderer.read_answer(ended, [TOOL]) == (told, calls)


@pytest.mark.parametrize("name", SAYS_NOTHING)
def test_text_before_a_call_is_kept(name: str) -> None:
    tokenizer, renderer = CALLERS[name], Renderer(CALLERS[name])
    call = as_call("look", WAYS[0])
    ids = tokenizer.encode("I look.\n" + written(tokenizer, [call], ""), add_special_tokens=False)
    assert renderer.read_answer(ids, [TOOL]) == ("I look.", [call])


@ANY_CALLER
def test_cut_or_broken_call_is_plain_text(name: str) -> None:
    tokenizer, renderer = CALLERS[name], Renderer(CALLERS[name])
    text = written(tokenizer, [as_call("look", WAYS[0])], "")
    for broken in (text[:-5], text[: len(text) // 2], text.replace("look", "").replace('""', "")):
        ids = tokenizer.encode(broken, add_special_tokens=False)
        assert renderer.read_answer(ids, [TOOL]) == (renderer.action_text(ids), []), broken


@ANY_CALLER
def test_agent_tool_calls_match_the_template(name: str) -> None:
    tokenizer, renderer = CALLERS[name], Renderer(CALLERS[name])
    said = "" if name in SAYS_NOTHING else "I look."
    calls = [as_call("look", each) for each in (WAYS[:1] if name in HAS_ONE else WAYS)]
    policy = ByHeart([written(tokenizer, calls, said), "done"], renderer=renderer)
    results = [{"role": "tool", "content": f'a "key" {i}'} for i in range(len(calls))]

    async def check() -> None:
        async with endpoint(policy) as at:
            body = {"messages": [USER], "tools": [TOOL]}
            status, first = await at.post("/v1/chat/completions", body)
            assert status == 200, first
            message = first["choices"][0]["message"]
            told = [each["function"] for each in message["tool_calls"]]
            assert [json.loads(each["arguments"]) for each in told] == [
                each["function"]["arguments"] for each in calls
            ]
            assert (message["content"] or "") == said
            assert first["choices"][0]["finish_reason"] == "tool_calls"
            answers = [
                {**each, "tool_call_id": call["id"]}
                for each, call in zip(results, message["tool_calls"], strict=True)
            ]
            body["messages"] = [USER, message, *answers]
            status, last = await at.post("/v1/chat/completions", body)
            assert (status, last["choices"][0]["message"]["content"]) == (200, "done")
            assert at.tape.starts == [0]  # nothing that was sampled was written anew

    asyncio.run(check())
    answer = {"role": "assistant", "content": said, "tool_calls": calls}
    assert policy.given[0] == renderer.of_messages([USER], tools=[TOOL])
    assert policy.given[1] == renderer.of_messages([USER, answer, *results], tools=[TOOL])


def test_template_probe_finds_each_call_form() -> None:
    forms = {name: Renderer(tokenizer).calls for name, tokenizer in CALLERS.items()}
    assert all(isinstance(each, CallForm) for each in forms.values()), forms
    keys = {name: form.arguments_key for name, form in forms.items() if isinstance(form, CallForm)}
    assert keys["llama"] == "parameters"
    assert keys["mistral"] == keys["qwen"] == "arguments"
