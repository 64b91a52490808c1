"""Laws of tools that a template lacks, and of their results: nothing is encoded again."""

from typing import Any

import pytest
from transformers import AddedToken, PreTrainedTokenizerFast

from actor.formats.renderer import Renderer
from common.formats.calls import as_call
from tests.actor.formats.test_renderer import CHATML, make_chatml

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
UNREADABLE = TOOLS_TEMPLATE.replace("arguments | tojson", "arguments | length | string")
TEXTS = TOOLS_TEMPLATE.replace("arguments | tojson", "arguments")  # It expects JSON texts.
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
    ("template", "words"),
    [
        (CHATML, "does not render the tools of a prompt, tool calls"),
        (UNREADABLE, "name and arguments are not found"),
        (CHATML + "{% if tools %}{{ raise_exception('what tools?') }}{% endif %}", "what tools"),
    ],
)
def test_template_without_tools_reports_the_reason(template: str, words: str) -> None:
    why = Renderer(with_calls(template)).calls
    assert isinstance(why, str)
    assert words in why


def test_arguments_become_a_text_where_the_template_needs_one() -> None:
    messages = [
        {"role": "user", "content": "find it"},
        {"role": "assistant", "content": "", "tool_calls": [as_call("look", {"where": "up"})]},
        {"role": "tool", "content": "a key"},
    ]
    of_texts, of_objects = (Renderer(with_calls(each)) for each in (TEXTS, TOOLS_TEMPLATE))
    ids = of_texts.of_messages(messages, tools=[TOOL])
    assert ids == of_objects.of_messages(messages, tools=[TOOL])
    sampled = TOKENIZER.encode(LOOK, add_special_tokens=False)
    assert of_texts.read_answer(sampled, [TOOL]) == of_objects.read_answer(sampled, [TOOL])


@pytest.mark.parametrize("is_stopped", [True, False])
def test_tool_results_match_the_full_template_rendering(is_stopped: bool) -> None:
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
    assert renderer.read_answer(sampled, [TOOL]) == ("", said["tool_calls"])
