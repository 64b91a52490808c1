"""Laws of tool calls in the forms of published models: read, shown as the template shows them."""

import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from actor.formats.call_turn import CallTurn, as_text
from actor.formats.renderer import with_ids
from actor.formats.tools import ToolRenderer, fault_of, reader_of
from actor.rollout.context import Turn
from common.config.actor import AgentFormat
from common.formats.calls import as_call
from common.formats.chat_template import render_chat
from tests.actor.formats.shapes import shapes
from tests.actor.formats.templates import CALLERS
from tests.actor.formats.trl_templates import tokenizer_of

FIELDS = {"action": {"type": "string"}, "count": {"type": "integer"}}
TOOLS: list[dict[str, Any]] = [
    {
        "name": "go_to",
        "description": "Moves.",
        "parameters": {"type": "object", "properties": FIELDS, "required": ["action"]},
    }
]
GIVEN = {"action": "the door {1} [a]", "count": 2}
DOOR = "the door {1} [a]"
# Families of forms: a template, and an answer as a model of the family samples it.
SAMPLED = {
    "qwen2_5": '<tool_call>\n{"name": "go_to", "arguments": GIVEN}\n</tool_call><|im_end|>',
    "qwen3": '<think>\nWhy {}?\n</think>\n\n<tool_call>\n{"name": "go_to", "arguments": GIVEN}\n'
    "</tool_call><|im_end|>",
    "qwen3_5_think": "Why <tool_call>?\n</think>\n\n<tool_call>\n<function=go_to>\n"
    "<parameter=action>\nDOOR\n</parameter>\n<parameter=count>\n2\n</parameter>\n</function>\n"
    "</tool_call><|im_end|>",
    "llama3_1": '{"name": "go_to", "parameters": GIVEN}<|eot_id|>',
    "glm4moe": "\n<think>Why?</think>\n<tool_call>go_to\n<arg_key>action</arg_key>\n"
    "<arg_value>DOOR</arg_value>\n<arg_key>count</arg_key>\n<arg_value>2</arg_value>\n"
    "</tool_call><|observation|>",
    "gptoss": "<|channel|>analysis<|message|>Why?<|end|><|start|>assistant<|channel|>commentary"
    " to=functions.go_to <|constrain|>json<|message|>GIVEN<|call|>",
    "lfm2_2_5": "<|tool_call_start|>[go_to(action='DOOR', count=2)]<|tool_call_end|><|im_end|>",
    "gemma4_v5": "<|channel>thought\nWhy?\n<channel|><|tool_call>call:go_to{"
    'action:<|"|>DOOR<|"|>,count:2}<tool_call|><|tool_response>',
    "muse_glimmer": ' to=go_to<|message|><atem:function_calls>\n<atem:invoke name="go_to">\n'
    '<atem:parameter name="action">DOOR</atem:parameter>\n<atem:parameter name="count">2'
    "</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eot|>",
    "mistral": '[TOOL_CALLS] [{"name": "go_to", "arguments": GIVEN, "id": "abcdefghi"}]</s>',
    "mistral_named": "[TOOL_CALLS]go_to[ARGS]GIVEN</s>",
    "deepseek": "Why?</think><|tool_calls_begin|><|tool_call_begin|>go_to<|tool_sep|>GIVEN"
    "<|tool_call_end|><|tool_calls_end|><|end_of_sentence|>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.go_to:0"
    "<|tool_call_argument_begin|>GIVEN<|tool_call_end|><|tool_calls_section_end|><|im_end|>",
    "olmo": '<function_calls>go_to(action="DOOR", count=2)</function_calls><|im_end|>',
    "minimax": 'Why?\n</think>\n\n\n<minimax:tool_call>\n<invoke name="go_to">\n'
    '<parameter name="action">DOOR</parameter>\n<parameter name="count">2</parameter>\n</invoke>\n'
    "</minimax:tool_call>[e~[",
}
SHAPES = {**shapes(), **{name: CALLERS[name] for name in ("mistral", "mistral_named")}}
FAMILIES = sorted(SAMPLED)


def vocabulary(name: str) -> PreTrainedTokenizerFast:
    return SHAPES[name] if name in SHAPES else tokenizer_of(name)


def answer_of(name: str) -> str:
    return SAMPLED[name].replace("GIVEN", json.dumps(GIVEN)).replace("DOOR", DOOR)


def sampled(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def tools_of(name: str) -> ToolRenderer:
    render = ToolRenderer(vocabulary(name), env="x").of("house", TOOLS)
    assert isinstance(render, ToolRenderer)
    return render


@pytest.mark.parametrize("name", FAMILIES)
def test_sampled_call_of_each_family_is_read(name: str) -> None:
    render = tools_of(name)
    ids = sampled(vocabulary(name), answer_of(name))
    said, action = reader_of(render, AgentFormat.FUNCTION_CALL, is_whole=False)(ids)
    assert json.loads(action or "null") == {"tool": "go_to", "arguments": GIVEN}
    assert "Why" not in said
    assert ids[-1] in render.end_of_turn_ids
    assert fault_of(render, ids) == ""


@pytest.mark.parametrize("name", FAMILIES)
def test_context_of_calls_equals_the_template(name: str) -> None:
    tokenizer = vocabulary(name)
    render = tools_of(name)
    tools = [{"type": "function", "function": each} for each in TOOLS]
    called = render.call_turn
    assert isinstance(called, CallTurn)
    call = as_text(as_call("go_to", GIVEN)) if called.has_text else as_call("go_to", GIVEN)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "You see a door."}]
    text = render_chat(tokenizer, messages, tools=tools)
    ids = render.first_prompt("You see a door.")
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    for seen in ("It is open.", 'It says "go".'):
        taken = render_taken(tokenizer, render, messages, call, tools)
        shown, answer = render.without_thoughts(ids, taken.token_ids)
        ids = [*shown, *answer]
        ids += render.after_action(seen, is_stopped=True, end=taken.end)
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "go_to", "content": seen},
        ]
        text = render_chat(tokenizer, with_ids(messages), tools=tools)
        assert tokenizer.decode(ids) == text
        assert ids == tokenizer.encode(text, add_special_tokens=False)


def closes_of(render: ToolRenderer) -> str:
    """The end of thoughts if the generation prompt begins them, else nothing."""
    opens, closes = render.thoughts.blocks[0]
    asked = render.thoughts.asked
    return f"{closes}\n\n" if asked.rfind(opens) > asked.rfind(closes) else ""


def render_taken(
    tokenizer: PreTrainedTokenizerFast,
    render: ToolRenderer,
    messages: list[dict[str, Any]],
    call: dict[str, Any],
    tools: list[dict[str, Any]],
) -> Turn:
    """The call as the template writes it, sampled with thoughts if the template asks for them."""
    told = [*messages, {"role": "assistant", "content": "", "tool_calls": [call]}]
    told.append({"role": "tool", "name": "go_to", "content": "RESULT"})
    whole = render_chat(tokenizer, with_ids(told), tools=tools)
    before = render_chat(tokenizer, with_ids(messages), tools=tools, add_generation_prompt=False)
    form = render.calls
    assert not isinstance(form, str)
    tail = whole[len(before) - 1 :]
    start = form.begin.search(tail)
    assert start is not None
    mark = render.shown([render._call_end.run[0]])
    first = start.start()
    if render.thoughts.between:  # Such a call begins with its recipient.
        first = tail.rindex(" to=", 0, start.end())
    text = tail[first : tail.index(mark, start.end())]
    if closes := closes_of(render):
        text = f"Why?\n{closes}{text}"
    ids = [*tokenizer.encode(text, add_special_tokens=False), render._call_end.run[0]]
    return Turn(ids, [0.0] * len(ids), [0] * len(ids))


@pytest.mark.parametrize("name", FAMILIES)
def test_malformed_call_is_an_invalid_action_with_a_reason(name: str) -> None:
    render = tools_of(name)
    read = reader_of(render, AgentFormat.FUNCTION_CALL, is_whole=False)
    text = answer_of(name)
    at = text.rindex("the door")
    ids = sampled(vocabulary(name), text[: at + 4])
    _, action = read(ids)
    assert action is None
    assert "cannot be read" in fault_of(render, ids)
    # An environment with tools of its own decides on their names.
    ids = sampled(vocabulary(name), text.replace("go_to", "come_to"))
    _, action = read(ids)
    assert json.loads(action or "")["tool"] == "come_to"
    assert fault_of(render, ids) == ""
    (ids,) = [sampled(vocabulary(name), f"{closes_of(render)}I go.")]
    assert read(ids)[1] == "I go."
    assert fault_of(render, ids) == "the answer has 0 calls; give one"


PARSERS = {  # Parsers of vLLM that need no package beyond the locked ones.
    "qwen2_5": "hermes",
    "qwen3": "qwen3_json",
    "llama3_1": "llama3_json",
    "glm4moe": "poolside_v1",
    "lfm2_2_5": "lfm2",
    "muse_glimmer": "muse_glimmer",
}


@pytest.mark.slow
def test_calls_are_read_as_parsers_of_vllm_read_them() -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    tools = [{"type": "function", "function": each} for each in TOOLS]
    user = {"role": "user", "content": "hi"}
    request = ChatCompletionRequest.model_validate({"messages": [user], "tools": tools})
    for name, parser_name in PARSERS.items():
        render = tools_of(name)
        for text in (answer_of(name), answer_of(name).replace("go_to", "come_to"), "I go."):
            said = render.call_text(sampled(vocabulary(name), text))
            parser_class: Any = ToolParserManager.get_tool_parser(parser_name)
            parser = parser_class(vocabulary(name), request.tools)
            found = parser.extract_tool_calls(said, request).tool_calls
            theirs = [(each.function.name, json.loads(each.function.arguments)) for each in found]
            form = render.calls
            assert not isinstance(form, str)
            own = form.read(
                said, [{**tools[0], "function": {**TOOLS[0], "name": n}} for n, _ in theirs]
            )
            if "come_to" in text:  # A parser may leave the types of an unknown tool.
                assert [each for each, _ in own[1]] == [each for each, _ in theirs], name
            else:
                assert own[1] == theirs, name
