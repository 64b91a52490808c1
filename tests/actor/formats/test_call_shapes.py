"""Laws of tool calls in templates whose calls and results depend on names, types and numbers."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from actor.formats.renderer import Renderer, with_ids
from actor.formats.tools import ToolRenderer, fault_of, reader_of
from actor.rollout.context import History, Room, Turn
from common.config.actor import AgentFormat
from common.errors import ConfigError
from common.formats.calls import CallForm, as_call
from common.formats.chat_template import render_chat
from tests.actor.formats.trl_templates import byte_tokenizer
from tools.exchange.agent_traj import read_conversations
from tools.offline.rows import row_of_conversation

GO = {
    "name": "go",
    "description": "Moves.",
    "parameters": {
        "type": "object",
        "properties": {
            "to": {"type": "string"},
            "far": {"type": "integer"},
            "by": {"type": "object"},
        },
    },
}
LOOK = {"name": "look", "description": "", "parameters": {"type": "object", "properties": {}}}
TOOLS = [GO, LOOK]
FUNCTIONS = [{"type": "function", "function": each} for each in TOOLS]
ASKS = "{% if add_generation_prompt %}<|start|>assistant<|message|>{% endif %}"
HEAD = (
    "{% for t in tools or [] %}{{ t.function.name }} {% for k, v in"
    " t.function.parameters.properties.items() %}{{ k }}{% endfor %}\n{% endfor %}"
    "{% for m in messages %}"
)
MESSAGE = "<|start|>{{ m.role }}<|message|>{{ m.content }}{% for c in m.tool_calls or [] %}"
LAST = "{% endfor %}<|end|>"
# gpt-oss's and Gemma 4's: a result has the name of the last call.
NAMED = (
    HEAD
    + "{% if m.tool_calls %}{% set n.last = m.tool_calls[-1].function.name %}{% endif %}"
    + "{% if m.role == 'tool' %}<|start|>tool {{ n.last }}<|message|>{{ m.content }}<|end|>"
    + "{% else %}"
    + MESSAGE
    + '<tool_call>{"name": "{{ c.function.name }}", "arguments":'
    + " {{ c.function.arguments | tojson }}}"
    + "</tool_call>"
    + LAST
    + "{% endif %}{% endfor %}"
    + ASKS
)
NAMED = "{% set n = namespace(last='') %}" + NAMED
# DeepSeek-V3.2's: attributes name types, and one section holds all calls.
SECTION = (
    HEAD
    + MESSAGE
    + '{% if loop.first %}\n<calls>{% endif %}\n<invoke name="{{ c.function.name }}">'
    + '{% for k, v in c.function.arguments.items() %}\n<parameter name="{{ k }}"'
    + " string=\"{{ 'true' if v is string else 'false' }}\">"
    + "{{ v if v is string else v | tojson }}</parameter>{% endfor %}\n</invoke>"
    + "{% if loop.last %}\n</calls>{% endif %}"
    + LAST
    + "{% endfor %}"
    + ASKS
)
# Kimi-K2's: one section holds all calls, as JSON behind their names.
JSON_SECTION = (
    HEAD
    + MESSAGE
    + "{% if loop.first %}<|calls|>{% endif %}<|call|>{{ c.function.name }}:{{ loop.index0 }}"
    + "<|args|>{{ c.function.arguments | tojson }}<|/call|>{% if loop.last %}<|/calls|>{% endif %}"
    + LAST
    + "{% endfor %}"
    + ASKS
)
# MiniMax-M1's: one section holds all calls, one in each line.
LINES = (
    HEAD
    + MESSAGE
    + '{% if loop.first %}<tool_calls>\n{% endif %}{"name": "{{ c.function.name }}", "arguments":'
    + " {{ c.function.arguments | tojson }}}\n{% if loop.last %}</tool_calls>{% endif %}"
    + LAST
    + "{% endfor %}"
    + ASKS
)
# Apertus's: the name of the tool is the key of the arguments in a list.
KEYED = (
    HEAD
    + MESSAGE
    + """{% if loop.first %}<|calls|>[{% endif %}{{ '{"' + c.function.name + '": ' }}"""
    + "{{ c.function.arguments | tojson }}}{% if loop.last %}]<|/calls|>{% else %}, {% endif %}"
    + LAST
    + "{% endfor %}"
    + ASKS
)
# MiniMax-M3's: the name of an argument is a tag.
KEY_TAGS = (
    HEAD
    + MESSAGE
    + '<invoke name="{{ c.function.name }}">{% for k, v in c.function.arguments.items() %}'
    + "<{{ k }}>{{ v }}</{{ k }}>{% endfor %}</invoke>"
    + LAST
    + "{% endfor %}"
    + ASKS
)
# GigaChat 3's: the call is a message of its own behind the end of the answer.
BEHIND = (
    HEAD
    + "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% for c in m.tool_calls or [] %}"
    + '<|start|>call<|message|>{"name": "{{ c.function.name }}", "arguments":'
    + " {{ c.function.arguments | tojson }}}<|end|>{% endfor %}{% endfor %}"
    + ASKS
)


def vocabulary(template: str) -> PreTrainedTokenizerFast:
    special = ["<|start|>", "<|message|>", "<|calls|>", "<|/calls|>", "<|call|>", "<|/call|>"]
    return byte_tokenizer(template, eos="<|end|>", special=[*special, "<|args|>"])


def of_tools(template: str) -> ToolRenderer:
    render = ToolRenderer(vocabulary(template), env="x").of("house", TOOLS)
    assert isinstance(render, ToolRenderer)
    return render


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def turn_of(render: ToolRenderer, text: str) -> Turn:
    ids = ids_of(render.tokenizer, text)
    return Turn(ids, [0.0] * len(ids), [0] * len(ids))


def messages_of(*names: str) -> list[dict[str, Any]]:
    said = {"role": "assistant", "content": "", "tool_calls": [as_call(n, {}) for n in names]}
    results = [{"role": "tool", "name": n, "content": f"{n}: a wall"} for n in names]
    return [{"role": "user", "content": "Which way?"}, said, *results]


def whole_of(tokenizer: Any, messages: list[dict[str, Any]]) -> list[int]:
    return ids_of(tokenizer, render_chat(tokenizer, with_ids(messages), tools=FUNCTIONS))


def test_observation_has_the_name_of_the_called_tool() -> None:
    render = of_tools(NAMED)
    taken = turn_of(render, '<tool_call>{"name": "look", "arguments": {}}</tool_call><|end|>')
    history = History(render, Room(max_tokens=1000, turn_tokens=100))

    async def never() -> Turn:
        raise AssertionError

    async def play() -> None:
        await history.begin("Which way?", render.first_prompt, never)
        history.tape.add(taken, 0)
        assert await history.go_on("look: a wall", taken, 1, never)

    asyncio.run(play())
    tokenizer = render.tokenizer
    assert history.tape.context == whole_of(tokenizer, messages_of("look"))
    assert "tool look<|message|>" in tokenizer.decode(history.tape.context)


def test_result_of_a_request_has_the_name_of_the_called_tool() -> None:
    renderer = Renderer(vocabulary(NAMED))
    _, said, *results = messages_of("look")
    results = [{"role": "tool", "content": "a wall", "tool_call_id": "id7"}]
    calls = [{"id": "id7", **said["tool_calls"][0]}]
    how: dict[str, Any] = {"is_stopped": True, "has_calls": True, "tools": FUNCTIONS}
    ids = renderer.after_calls(results, calls=calls, **how)
    after = "<|start|>tool look<|message|>a wall<|end|><|start|>assistant<|message|>"
    assert renderer.shown(ids) == after
    # Without the calls, the name in the result is used.
    ids = renderer.after_calls([{"role": "tool", "name": "look", "content": "a wall"}], **how)
    assert renderer.shown(ids) == after


def test_rows_have_the_name_of_the_called_tool(tmp_path: Path) -> None:
    tokenizer = vocabulary(NAMED)
    messages = messages_of("look")
    del messages[-1]["name"]  # OpenAI's results have none.
    told = [*messages, {"role": "assistant", "content": "I see."}]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": told, "tools": FUNCTIONS}), encoding="utf-8")
    (conversation,) = read_conversations(path)
    row = row_of_conversation(tokenizer, conversation)
    text = render_chat(tokenizer, with_ids(told), tools=FUNCTIONS, add_generation_prompt=False)
    assert tokenizer.decode(row.token_ids.tolist()) == text
    assert "tool look<|message|>" in text


GIVEN = {"to": 'a <b> & "c"', "far": 2, "by": {"x": [1, None]}}
SAMPLED = {
    SECTION: '\n<calls>\n<invoke name="go">\n<parameter name="to" string="true">a <b> & "c"'
    '</parameter>\n<parameter name="far" string="false">2</parameter>\n<parameter name="by"'
    ' string="false">{"x": [1, null]}</parameter>\n</invoke>SECOND\n</calls><|end|>',
    JSON_SECTION: "<|calls|><|call|>go:0<|args|>" + json.dumps(GIVEN) + "<|/call|>SECOND"
    "<|/calls|><|end|>",
    LINES: '<tool_calls>\n{"name": "go", "arguments": ' + json.dumps(GIVEN) + "}\nSECOND"
    "</tool_calls><|end|>",
    KEYED: '<|calls|>[{"go": ' + json.dumps(GIVEN) + "}SECOND]<|/calls|><|end|>",
}
SECOND = {
    SECTION: '\n<invoke name="look">\n</invoke>',
    JSON_SECTION: "<|call|>look:1<|args|>{}<|/call|>",
    LINES: '{"name": "look", "arguments": {}}\n',
    KEYED: ', {"look": {}}',
}
OF_SECTIONS = pytest.mark.parametrize(
    "template", SAMPLED, ids=["attributes", "json", "lines", "keyed"]
)


@OF_SECTIONS
def test_calls_of_one_section_are_read(template: str) -> None:
    render = of_tools(template)
    read = reader_of(render, AgentFormat.FUNCTION_CALL, is_whole=False)
    one = ids_of(render.tokenizer, SAMPLED[template].replace("SECOND", ""))
    assert json.loads(read(one)[1] or "null") == {"tool": "go", "arguments": GIVEN}
    two = ids_of(render.tokenizer, SAMPLED[template].replace("SECOND", SECOND[template]))
    assert isinstance(render.calls, CallForm)
    _, calls = render.calls.read(render.call_text(two), FUNCTIONS)
    assert calls == [("go", GIVEN), ("look", {})]
    assert read(two)[1] is None
    assert fault_of(render, two) == "the answer has 2 calls; give one"


@OF_SECTIONS
def test_text_within_a_section_of_calls_is_a_fault(template: str) -> None:
    render = of_tools(template)
    ids = ids_of(render.tokenizer, SAMPLED[template].replace("SECOND", " and so on"))
    assert render.called(ids) is None
    assert fault_of(render, ids) == "the call cannot be read: a call does not end"


@OF_SECTIONS
def test_several_calls_of_a_record_are_learnt(template: str, tmp_path: Path) -> None:
    tokenizer = vocabulary(template)
    told = messages_of("go", "look")
    told[1]["tool_calls"][0]["function"]["arguments"] = GIVEN
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": told}), encoding="utf-8")  # Without the tools.
    (conversation,) = read_conversations(path)
    row = row_of_conversation(tokenizer, conversation)
    learnt = str(tokenizer.decode(row.token_ids[row.mask].tolist()))
    expected = SAMPLED[template].replace("SECOND", SECOND[template])
    assert learnt.replace("\n", "") == expected.replace("\n", "")


@pytest.mark.parametrize("template", [KEY_TAGS, BEHIND], ids=["key_tags", "behind_the_end"])
def test_calls_that_cannot_be_read_back_are_refused(template: str) -> None:
    with pytest.raises(ConfigError, match=r"function_call.* that cannot be read back: .*give"):
        of_tools(template)
    reason = Renderer(vocabulary(template)).calls
    assert isinstance(reason, str)
    assert "writes tool calls in a form that cannot be read back" in reason


def test_text_that_a_template_drops_beside_calls_is_refused(tmp_path: Path) -> None:
    template = SECTION.replace("{{ m.content }}", "{{ m.content if not m.tool_calls }}")
    told = messages_of("look")
    path = tmp_path / "rows.jsonl"
    for said, is_refused in (("", False), ("I look.", True)):
        told[1]["content"] = said
        path.write_text(json.dumps({"messages": told}), encoding="utf-8")
        (conversation,) = read_conversations(path)
        if not is_refused:
            assert row_of_conversation(vocabulary(template), conversation).mask.any()
            continue
        with pytest.raises(
            ConfigError, match=r"record 1: content: .* not write the text before the"
        ):
            row_of_conversation(vocabulary(template), conversation)


def test_tags_hold_python_values_and_character_data() -> None:
    form = CallForm.of(
        "<f=probe_of_a_name><p=first_probed_key>first probed value</p><p=second_probed_key>second"
        " one</p></f>",
        "<f=probe_of_a_name></f>",
    )
    text = "<f=go><p=to><![CDATA[a </b>]]></p><p=by>{'x': [1, None]}</p></f>"
    _, calls = form.read(text, FUNCTIONS)
    assert calls == [("go", {"to": "a </b>", "by": {"x": [1, None]}})]
