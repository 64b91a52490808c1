"""Laws of tool calls: what is read is what the template writes, and nothing is encoded again."""

from typing import Any

import pytest
from transformers import AddedToken, PreTrainedTokenizerFast

from actor.agents.tool_calls import as_call, read_calls
from actor.rollout.render import Renderer
from tests.actor.rollout.test_render import CHATML, make_chatml

# The form of Qwen2.5's
TOOLS_TEMPLATE = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\nAnswer <tool_call>\\n{"name": <name>, "arguments": <args>}\\n</tool_call>' }}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
OTHER_FORM = TOOLS_TEMPLATE.replace("<tool_call>", "[CALL]").replace("</tool_call>", "[/CALL]")
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look there.",
        "parameters": {"type": "object", "properties": {"where": {"type": "string"}}},
    },
}
LOOK = '<tool_call>\n{"name": "look", "arguments": {"where": "up"}}\n</tool_call>'


def with_calls(template: str = TOOLS_TEMPLATE) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose marks of calls are tokens, but no special ones, as Qwen's."""
    tokenizer = make_chatml(template)
    marks = [AddedToken(mark, special=False) for mark in ("<tool_call>", "</tool_call>")]
    tokenizer.add_tokens(marks)
    return tokenizer


TOKENIZER = with_calls()


@pytest.mark.parametrize(
    ("text", "said", "num_calls"),
    [
        (LOOK, "", 1),
        (f"I look.\n{LOOK}\n{LOOK}", "I look.", 2),
        (LOOK.removesuffix("</tool_call>"), "", 1),  # ended by the end of its turn
        ("no call at all ", "no call at all", 0),
        (f"{LOOK}\n<tool_call>\n{{broken", f"{LOOK}\n<tool_call>\n{{broken", 0),
        ('<tool_call>{"name": 5, "arguments": {}}</tool_call>', None, 0),
        ('<tool_call>{"name": "x", "arguments": NaN}</tool_call>', None, 0),
        ("<tool_call>" + "[" * 100_000, None, 0),
        ('<tool_call>{"name": "x", "arguments": {"a": "</tool_call>"}}</tool_call>', "", 1),
    ],
)
def test_calls_are_read_whole_or_not_at_all(text: str, said: str | None, num_calls: int) -> None:
    found, calls = read_calls(text)
    assert found == (text if said is None else said)
    assert len(calls) == num_calls
    assert calls[:1] in (
        [],
        [as_call("look", {"where": "up"})],
        [as_call("x", {"a": "</tool_call>"})],
    )


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (TOOLS_TEMPLATE, ""),
        (CHATML, "no place for them"),
        (OTHER_FORM, "<tool_call>{JSON}</tool_call>"),
        (CHATML + "{% if tools %}{{ raise_exception('no tools') }}{% endif %}", "no tools"),
    ],
)
def test_a_template_says_why_it_takes_no_tools(template: str, words: str) -> None:
    why = Renderer(with_calls(template)).why_no_tools
    assert words in why
    assert bool(words) == bool(why)


@pytest.mark.parametrize("is_stopped", [True, False])
def test_results_after_calls_are_the_template_s_rendering_of_the_whole(is_stopped: bool) -> None:
    renderer = Renderer(TOKENIZER)
    user = {"role": "user", "content": "find <|im_end|> it"}
    said = {"role": "assistant", "content": "", "tool_calls": [as_call("look", {"where": "up"})]}
    results = [{"role": "tool", "content": "a key"}, {"role": "tool", "content": "<tool_call>"}]
    ids = renderer.of_messages([user], tools=[TOOL])
    sampled = TOKENIZER.encode(LOOK, add_special_tokens=False)
    sampled += renderer.end_of_turn_ids[:1] if is_stopped else []
    ids += sampled
    ids += renderer.after_calls(results, is_stopped=is_stopped, has_calls=True, tools=[TOOL])
    assert ids == renderer.of_messages([user, said, *results], tools=[TOOL])
    (call,) = TOKENIZER.encode("<tool_call>", add_special_tokens=False)
    assert ids.count(call) == 2  # the template's own and the policy's; others' text makes none
    assert renderer.read_answer(sampled) == ("", said["tool_calls"])
