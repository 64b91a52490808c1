"""Laws of measuring templates in the shapes of published models that share marks between parts."""

from typing import Any

import pytest

from actor.formats.call_turn import CallTurn
from actor.formats.renderer import Renderer
from common.errors import ConfigError
from common.formats.chat_template import fix_template, render_chat
from common.text import shared_end_tags, shared_tags
from tests.actor.formats.trl_templates import byte_tokenizer
from tools.offline.written_answers import AnswerWriter

USER = {"role": "user", "content": "Which way?"}
ASK = "{% if add_generation_prompt %}ASKED{% endif %}"
# GLM-4.7's: a past answer begins with the end of the thoughts, which shares "<" with its beginning.
CLOSED_ONLY = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}{% else %}"
    "<|assistant|>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% else %}</think>{% endif %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
    + ASK.replace("ASKED", "<|assistant|><think>")
)
# Kimi-K3's: parts of an answer and the message itself end with the same mark.
PARTS = (
    "{% for m in messages %}<|open|>message role={{ m.role }}<|sep|>"
    "{% if m.role == 'assistant' %}<|open|>think<|sep|>{{ m.reasoning_content or '' }}"
    "<|close|>think<|sep|><|open|>response<|sep|>{{ m.content }}<|close|>response<|sep|>"
    "{% else %}{{ m.content }}{% endif %}<|close|>message<|sep|><|end_of_msg|>{% endfor %}"
    + ASK.replace("ASKED", "<|open|>message role=assistant<|sep|><|open|>think<|sep|>")
)
OF_PARTS = ["<|open|>", "<|close|>", "<|sep|>"]
# Nemotron-Nano-v2's: a line break before the end of a turn.
SPACED = (
    "{% for m in messages %}<|head|>{{ m.role }}\n{{ m.content }}\n<|end|>\n{% endfor %}"
    + ASK.replace("ASKED", "<|head|>assistant\n")
)
# Nemotron 3's: all answers begin with the mark of thoughts.
ALWAYS_OPEN = (
    "{% for m in messages %}<|head|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n{% else %}"
    "<think></think>{% endif %}{% endif %}{{ m.content }}<|end|>\n{% endfor %}"
    + ASK.replace("ASKED", "<|head|>assistant\n<think>\n")
)
# GLM-4.6's without thinking: prompts and past answers have an empty block of thoughts.
ALWAYS_CLOSED = (
    "{% for m in messages %}<|head|>{{ m.role }}{% if m.role == 'assistant' %}"
    "{{ '\\n<think>' + (m.reasoning_content or '') + '</think>\\n' }}{% else %}"
    "{{ '\\n' }}{% endif %}{{ m.content }}<|end|>{% endfor %}"
    + ASK.replace("ASKED", "<|head|>assistant{{ '\\n<think></think>' if nothink else '' }}")
)
# Nemotron-Nano-v2's: past answers have no thoughts, and the template shows none.
DROPS = (
    "{% for m in messages %}<|head|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|end|>\n"
    "{% endfor %}" + ASK.replace("ASKED", "<|head|>assistant\n<think>\n")
)
# Command R7B's: a header that the policy samples before its text, and an empty block of thoughts.
HEADED = (
    "{% for m in messages %}<|head|>{{ m.role }}<|text|>{{ m.content }}<|end|>{% endfor %}"
    + ASK.replace("ASKED", "<|head|>assistant<think></think>")
)
# Solar-Open's: thoughts are a message of their own, and end as the answer does.
SAME_END = (
    "{% for m in messages %}{% if m.reasoning %}<|begin|>{{ m.role }}<|think|>{{ m.reasoning }}"
    "<|end|>{% endif %}<|begin|>{{ m.role }}<|content|>{{ m.content }}<|end|>{% endfor %}"
    + ASK.replace("ASKED", "<|begin|>assistant")
)
OF_SAME_END = ["<|begin|>", "<|end|>", "<|think|>", "<|content|>"]


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("one", "other", "start"),
    [
        ("<a><think>", "<a></think>", "<a>"),
        ("<a>[THINK]", "<a>[TOOL]", "<a>"),
        ("<a>\nb", "<a>\nc", "<a>\n"),
        ("<a>", "<a><b>", "<a>"),
        ("1 < 2", "1 < 3", "1 < "),
    ],
)
def test_shared_text_has_whole_tags_only(one: str, other: str, start: str) -> None:
    assert shared_tags(one, other) == start
    assert shared_tags(other, one) == start


def test_shared_end_has_whole_tags_only() -> None:
    assert shared_end_tags("x</think>", "y<think>") == ""
    assert shared_end_tags("a<b>c", "d<b>c") == "<b>c"


def test_thoughts_of_tags_that_begin_alike_are_whole() -> None:
    tokenizer = byte_tokenizer(CLOSED_ONLY, eos="<|end|>", special=["<|user|>", "<|assistant|>"])
    renderer = Renderer(tokenizer)
    assert (renderer.turns.asked, renderer.turns.answered) == ("<think>", "</think>")
    assert renderer.thoughts.blocks[0] == ("<think>", "</think>")
    answer = ids_of(tokenizer, "Left?</think>go left<|end|>")
    assert renderer.thought_text(answer) == "Left?"
    assert renderer.action_text(answer) == "go left"
    told = {"role": "assistant", "content": "go left"}
    written = AnswerWriter(tokenizer).write(told, tools=[])
    assert (written.header, written.sampled) == ("</think>", ids_of(tokenizer, "go left<|end|>"))


def test_end_of_a_part_ends_no_turn() -> None:
    tokenizer = byte_tokenizer(PARTS, eos="<|end_of_msg|>", special=OF_PARTS)
    renderer = Renderer(tokenizer)
    (end,) = renderer.end_of_turn_ids
    assert renderer.shown([end]) == "<|end_of_msg|>"
    told = {"role": "assistant", "reasoning_content": "Left?", "content": "go left"}
    asked = render_chat(tokenizer, [USER])
    whole = render_chat(tokenizer, [USER, told, USER])
    text = whole.removeprefix(asked)
    answer = ids_of(tokenizer, text[: text.index("<|end_of_msg|>") + len("<|end_of_msg|>")])
    assert renderer.thought_text(answer) == "Left?"
    assert renderer.action_text(answer) == "go left"
    after = renderer.after_action("Which way?", is_stopped=True, end=end)
    assert [*ids_of(tokenizer, asked), *answer, *after] == ids_of(tokenizer, whole)
    cut = ids_of(tokenizer, "Left?<|close|>think<|sep|><|open|>response<|sep|>go left")
    after = renderer.after_action("Which way?", is_stopped=False)
    assert [*ids_of(tokenizer, asked), *cut, *after] == ids_of(tokenizer, whole)
    written = AnswerWriter(tokenizer).write(told, tools=[])
    assert written.sampled == answer


def test_answer_is_learnt_with_the_space_before_its_end() -> None:
    tokenizer = byte_tokenizer(SPACED, eos="<|end|>", special=["<|head|>"])
    written = AnswerWriter(tokenizer).write({"role": "assistant", "content": "go"}, tools=[])
    assert written.sampled == ids_of(tokenizer, "go\n<|end|>")
    written = AnswerWriter(tokenizer).write({"role": "assistant", "content": "go\n"}, tools=[])
    assert written.sampled == ids_of(tokenizer, "go\n<|end|>")
    renderer = Renderer(tokenizer)
    texts = ["Which way?", "go", "a wall"]
    roles = ("user", "assistant", "user")
    said = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    assert renderer.conversation(texts) == ids_of(tokenizer, render_chat(tokenizer, said))


def test_answer_without_thoughts_is_learnt_outside_of_thoughts() -> None:
    tokenizer = byte_tokenizer(ALWAYS_OPEN, eos="<|end|>", special=["<|head|>"])
    writer = AnswerWriter(tokenizer)
    asked = ids_of(tokenizer, render_chat(tokenizer, [USER]))
    told: dict[str, Any] = {"role": "assistant", "content": "go"}
    for more, learnt in (
        ({}, "go<|end|>"),
        ({"reasoning_content": "Left?"}, "Left?\n</think>\ngo<|end|>"),
    ):
        written = writer.write({**told, **more}, tools=[])
        assert tokenizer.decode(written.sampled) == learnt
        row = [*writer.with_header(asked, written.header), *written.sampled]
        whole = render_chat(tokenizer, [USER, {**told, **more}], add_generation_prompt=False)
        assert tokenizer.decode(row) == whole.rstrip()


def rows_of(tokenizer: Any, told: dict[str, Any]) -> tuple[str, str]:
    """Return prompt and learnt text of the first answer."""
    writer = AnswerWriter(tokenizer)
    written = writer.write({"role": "assistant", **told}, tools=[])
    asked = ids_of(tokenizer, render_chat(tokenizer, [USER]))
    prompt = tokenizer.decode(writer.with_header(asked, written.header))
    return prompt.partition(USER["content"])[2], tokenizer.decode(written.sampled)


def test_empty_thoughts_of_all_prompts_are_replaced_by_those_of_a_record() -> None:
    tokenizer = byte_tokenizer(ALWAYS_CLOSED, eos="<|end|>", special=["<|head|>"])
    fix_template(None, {"nothink": True})
    start = "<|end|><|head|>assistant\n"
    thoughts = {"content": "go", "reasoning_content": "Left?"}
    assert rows_of(tokenizer, {"content": "go"}) == (f"{start}<think></think>", "\ngo<|end|>")
    assert rows_of(tokenizer, thoughts) == (start, "<think>Left?</think>\ngo<|end|>")
    told = {"content": "<think>\nLeft?\n</think>\n\ngo"}
    assert rows_of(tokenizer, told) == (start, f"{told['content']}<|end|>")


def test_space_before_thoughts_is_learnt_like_the_template_writes_it() -> None:
    tokenizer = byte_tokenizer(ALWAYS_CLOSED, eos="<|end|>", special=["<|head|>"])
    start = "<|end|><|head|>assistant"
    for told, learnt in (
        ({"content": "go", "reasoning_content": "Left?"}, "\n<think>Left?</think>\ngo<|end|>"),
        ({"content": "<think>Left?</think>\ngo"}, "\n<think>Left?</think>\ngo<|end|>"),
        ({"content": "\n<think>Left?</think>\ngo"}, "\n<think>Left?</think>\ngo<|end|>"),
        ({"content": "<think>Left"}, "\n<think>Left<|end|>"),
        ({"content": "go"}, "go<|end|>"),
    ):
        assert rows_of(tokenizer, told) == (start, learnt)


def test_thoughts_that_a_prompt_begins_are_ended_and_not_learnt() -> None:
    tokenizer = byte_tokenizer(DROPS, eos="<|end|>", special=["<|head|>"])
    start = "<|end|>\n<|head|>assistant\n<think>\n"
    assert rows_of(tokenizer, {"content": "go"}) == (f"{start}\n</think>\n\n", "go<|end|>")
    for told, learnt in (
        ("<think>\nLeft?\n</think>\n\ngo", "Left?\n</think>\n\ngo<|end|>"),
        ("Left?\n</think>\n\ngo", "Left?\n</think>\n\ngo<|end|>"),
        ("<think>\nLeft", "Left<|end|>"),  # Cut within its thoughts.
    ):
        assert rows_of(tokenizer, {"content": told}) == (start, learnt)


def test_header_that_a_policy_samples_is_learnt() -> None:
    tokenizer = byte_tokenizer(HEADED, eos="<|end|>", special=["<|head|>", "<|text|>"])
    written = AnswerWriter(tokenizer).write({"role": "assistant", "content": "go"}, tools=[])
    assert tokenizer.decode(written.sampled) == "<|text|>go<|end|>"
    assert written.header == "<think></think>"


def test_space_that_a_policy_samples_is_learnt() -> None:
    spaced = SPACED.replace("{{ m.role }}\n", "{{ m.role }}:{{ ' ' }}")
    spaced = spaced.replace("assistant\n{% endif", "assistant:{% endif")
    tokenizer = byte_tokenizer(spaced, eos="<|end|>", special=["<|head|>"])
    for text in ("go", " go"):
        written = AnswerWriter(tokenizer).write({"role": "assistant", "content": text}, tools=[])
        assert tokenizer.decode(written.sampled) == " go\n<|end|>"


def test_header_before_a_past_call_is_the_whole_one() -> None:
    calling = HEADED.replace(
        "<|text|>{{ m.content }}",
        "{% if m.tool_calls %}<think></think>CALL{% else %}<|text|>{{ m.content }}{% endif %}",
    ).replace(
        "CALL",
        '<|call|>[{"name": "{{'
        ' m.tool_calls[0].function.name }}", "parameters": {{'
        " m.tool_calls[0].function.arguments | tojson }}}]",
    )
    tools = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    special = ["<|head|>", "<|text|>", "<|call|>"]
    renderer = Renderer(byte_tokenizer(tools + calling, eos="<|end|>", special=special))
    assert isinstance(renderer.call_turn, CallTurn)
    assert renderer.call_turn.answered == "<think></think>"


def test_thoughts_that_end_like_answers_need_another_end() -> None:
    with pytest.raises(ConfigError, match=r"'<\|end\|>', which also ends its thoughts; give"):
        Renderer(byte_tokenizer(SAME_END, eos="<|end|>", special=OF_SAME_END))
    renderer = Renderer(byte_tokenizer(SAME_END, eos="<|flush|>", special=OF_SAME_END))
    assert [renderer.shown([each]) for each in renderer.end_of_turn_ids] == ["<|flush|>"]
    assert renderer.shown([renderer.sampled_end(has_calls=False)]) == "<|flush|>"
