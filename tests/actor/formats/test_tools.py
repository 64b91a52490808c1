"""Laws of function calling: a template's own calls and answers, and templates that know none."""

import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from actor.formats.renderer import Renderer, with_ids
from actor.formats.tools import ToolRenderer, make_renderer, tool_of
from common.config.actor import AgentFormat
from common.errors import ConfigError
from common.formats.calls import as_call
from tests.actor.formats.templates import BODY, CALLERS, TOOLS
from tests.actor.formats.test_renderer import CHATML, COMPACT, make_chatml
from tests.actor.formats.trl_templates import tokenizer_of

CALLING = CALLERS["qwen"]
ANY_CALLER = pytest.mark.parametrize("tokenizer", CALLERS.values(), ids=CALLERS)
USER = {"role": "user", "content": "hi"}
SEEN = 'ok "!"\nyou see'


def said(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], env: str) -> list[int]:
    text = tokenizer.apply_chat_template(
        with_ids(messages), tools=[tool_of(env)], tokenize=False, add_generation_prompt=True
    )
    assert isinstance(text, str)
    return tokenizer.encode(text, add_special_tokens=False)


def call_of(action: str, env: str) -> dict[str, Any]:
    function = {"name": env, "arguments": {"action": action}}
    call = {"type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


@ANY_CALLER
def test_rendered_pieces_equal_full_tool_template(tokenizer: PreTrainedTokenizerFast) -> None:
    render = ToolRenderer(tokenizer, env="x").of("maze")
    assert isinstance(render, ToolRenderer)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "you see a red ball"}]
    ids = render.first_prompt("you see a red ball")
    assert ids == said(tokenizer, messages, "maze")
    for action in ("move up", 'say "go"'):
        before = len(said(tokenizer, messages, "maze"))
        messages.append(call_of(action, "maze"))
        closed = tokenizer.apply_chat_template(
            with_ids(messages), tools=[tool_of("maze")], tokenize=False
        )
        assert isinstance(closed, str)
        sampled = tokenizer.encode(closed.removesuffix("\n"), add_special_tokens=False)[before:]
        assert render.called(sampled) == action
        messages.append({"role": "tool", "name": "maze", "content": SEEN})
        ids += [*sampled, *render.after_action(SEEN, is_stopped=True)]
        assert ids == said(tokenizer, messages, "maze")
    messages[-1:] = [{"role": "user", "content": "go on"}]  # Not a tool result.
    asked = render.after_turn("go on", is_stopped=True)
    assert said(tokenizer, messages, "maze")[-len(asked) :] == asked
    assert asked != render.after_action("go on", is_stopped=True)


@ANY_CALLER
def test_unfinished_call_gets_one_extra_end_token(tokenizer: PreTrainedTokenizerFast) -> None:
    render = ToolRenderer(tokenizer, env="maze")
    stopped = render.after_action("you see", is_stopped=True)
    assert render.after_action("you see", is_stopped=False) == [render.end_of_turn_ids[0], *stopped]


def test_environment_becomes_a_tool_of_its_name() -> None:
    render = make_renderer(CALLING, AgentFormat.FUNCTION_CALL)
    maze = CALLING.decode(render.of("maze").first_prompt("hi"))
    assert '"name": "maze"' in maze
    assert render.of("maze") is render.of("maze")
    assert '"name": "a_b_c"' in CALLING.decode(render.of("a:b/c").first_prompt("hi"))
    plain = make_renderer(CALLING, AgentFormat.REACT)
    assert plain.of("maze") is plain
    assert CALLING.decode(plain.first_prompt("hi")) == CALLING.decode(
        Renderer(CALLING).first_prompt("hi")
    )


@ANY_CALLER
def test_environment_tools_replace_the_default_tool(tokenizer: PreTrainedTokenizerFast) -> None:
    fields = {"a": {"type": "integer"}, "b": {"type": "string"}}
    function = {"name": "add", "description": "", "parameters": {"properties": fields}}
    render = make_renderer(tokenizer, AgentFormat.FUNCTION_CALL).of("sums", [function])
    assert isinstance(render, ToolRenderer)
    assert '"name": "add"' in tokenizer.decode(render.first_prompt("hi"))

    def asked(name: str) -> list[int]:
        given = {"a": 1, "b": "1"}
        call = {"role": "assistant", "content": "", "tool_calls": [as_call(name, given)]}
        first, whole = (
            tokenizer.apply_chat_template(
                with_ids(each),
                tools=[{"function": function}],
                tokenize=False,
                add_generation_prompt=is_asked,
            )
            for each, is_asked in (([USER], True), ([USER, call], False))
        )
        return tokenizer.encode(str(whole).removeprefix(str(first)), add_special_tokens=False)

    sent = json.loads(render.called(asked("add")) or "")
    assert sent == {"tool": "add", "arguments": {"a": 1, "b": "1"}}
    assert json.loads(render.called(asked("sums")) or "")["tool"] == "sums"
    assert render.called(tokenizer.encode("It is 2.", add_special_tokens=False)) == "It is 2."
    other_form = 'Action: {"tool": "add", "arguments": {}}'
    assert render.called(tokenizer.encode(other_form, add_special_tokens=False)) is None
    assert render.called([]) is None


REFUSED = {
    "without_tools": (CHATML, "does not render the tools of a prompt"),
    "no_answers_of_tools": (
        TOOLS
        + CHATML.replace(
            "<|im_start|>{{",
            "{% if m.role == 'tool' %}{{ raise_exception('what tool?') }}{% endif %}<|im_start|>{{",
        ),
        r"actor\.format=function_call: .* what tool\?",
    ),
    "refuses": (
        "{% if tools %}{{ raise_exception('no tools here') }}{% endif %}" + CHATML,
        "no tools here",
    ),
    "shows_no_calls": (TOOLS + BODY.replace("CALL", ""), "does not render tool calls"),
}


@pytest.mark.parametrize(("template", "named"), REFUSED.values(), ids=REFUSED)
def test_template_without_calls_is_refused_by_name(template: str, named: str) -> None:
    tokenizer = make_chatml(template)
    with pytest.raises(ConfigError, match=named):
        make_renderer(tokenizer, AgentFormat.FUNCTION_CALL)


def test_compact_template_supports_no_tools() -> None:
    make_renderer(COMPACT, AgentFormat.REACT)
    with pytest.raises(ConfigError, match=r"function_call.*does not render the tools"):
        make_renderer(COMPACT, AgentFormat.FUNCTION_CALL)


@pytest.mark.parametrize(
    ("template", "content", "words"),
    [
        ("qwen2_5", "I look.", ""),
        ("phi3", "", r"drops message 2 \(assistant\): tool_calls"),
        ("llama3_1", "I look.", r"drops message 2 \(assistant\): content"),
    ],
)
def test_template_that_drops_a_part_of_a_prompt_is_refused(
    template: str, content: str, words: str
) -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": content, "tool_calls": [as_call("look", {"a": 1})]},
        {"role": "tool", "content": "a key"},
        {"role": "assistant", "content": "so"},
    ]
    tokenizer = tokenizer_of(template)
    render = Renderer(tokenizer)
    if words:
        with pytest.raises(ValueError, match=words):
            render.opened(messages, "and?")
    else:
        assert '"look"' in tokenizer.decode(render.opened(messages, "and?"))
