"""Laws of exports in the shapes of published templates: messages are split where they end."""

import json
from pathlib import Path
from typing import Any

import pytest

from actor.formats.renderer import Renderer
from actor.formats.tools import ToolRenderer
from common.errors import ConfigError
from common.formats.chat_template import fix_template
from tests.actor.formats.test_call_shapes import JSON_SECTION, NAMED, SECTION, TOOLS, of_tools
from tests.actor.formats.trl_templates import byte_tokenizer
from tests.common.formats.test_template_shapes import OF_PARTS, PARTS
from tests.tools.exchange.test_round_trip import of_tokens
from tools.exchange.writing import Framing, write
from tools.offline.rows import read_rows

# Apriel 1.5's: the end of a turn stands behind an answer twice.
TWICE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}\n<|end|>\n"
    "{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
OF_TWICE = ["<|user|>", "<|assistant|>"]
SHAPES = {
    "parts": (
        PARTS,
        "<|end_of_msg|>",
        OF_PARTS,
        "Left?<|close|>think<|sep|><|open|>response<|sep|>",
    ),
    "twice": (TWICE, "<|end|>", OF_TWICE, ""),
}
CALLS = {
    NAMED: '<tool_call>{"name": "look", "arguments": {}}</tool_call>',
    SECTION: '\n<calls>\n<invoke name="look">\n</invoke>\n</calls>',
    JSON_SECTION: "<|calls|><|call|>look:0<|args|>{}<|/call|><|/calls|>",
}


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def exported(tmp_path: Path, tokenizer: Any, parts: list[tuple[list[int], int]]) -> Path:
    ids = [each for part, _ in parts for each in part]
    mask = [sampled for part, sampled in parts for _ in part]
    path = tmp_path / "out.jsonl"
    write("sft", path, [of_tokens(ids, mask)], Framing(tokenizer))
    return path


def record_of(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("has_tokens", [True, False])
def test_ends_of_several_tokens_are_split(name: str, has_tokens: bool, tmp_path: Path) -> None:
    template, eos, special, head = SHAPES[name]
    tokenizer = byte_tokenizer(template, eos=eos, special=special)
    render = Renderer(tokenizer)
    end = render.sampled_end(has_calls=False)
    texts = ["Which way?", f"{head}go left", "a wall", f"{head}open it"]
    one, two = ([*ids_of(tokenizer, t), *render.lead_of_end, end] for t in texts[1::2])
    after = render.after_action(texts[2], is_stopped=True, end=end)
    parts = [(render.first_prompt(texts[0]), 0), (one, 1), (after, 0), (two, 1)]
    path = exported(tmp_path, tokenizer, parts)
    record = record_of(path)
    lead = str(tokenizer.decode(render.lead_of_end))
    said = [text + lead * (i % 2) for i, text in enumerate(texts)]
    assert [each["content"] for each in record["messages"]] == said
    if not has_tokens:
        del record["token_ids"]
        path.write_text(json.dumps(record), encoding="utf-8")
    (row,) = read_rows(path, tokenizer=tokenizer, max_tokens=1000, key="k")
    assert row.token_ids.tolist() == [each for part, _ in parts for each in part]


@pytest.mark.parametrize("template", CALLS, ids=["named", "section", "json"])
def test_prompts_with_tools_and_results_are_split(template: str, tmp_path: Path) -> None:
    render = of_tools(template)
    tokenizer = render.tokenizer
    answer = [*ids_of(tokenizer, CALLS[template]), *ids_of(tokenizer, "<|end|>")]
    after = render.after_action("a wall", is_stopped=True, end=answer[-1], answer=answer)
    first = render.first_prompt("Which way?")
    parts = [(first, 0), (answer, 1), (after, 0), (answer, 1), (after, 0), (answer, 1)]
    path = exported(tmp_path, tokenizer, parts)
    messages = record_of(path)["messages"]
    call = CALLS[template]
    assert [(each["role"], each["content"]) for each in messages[1:]] == [
        *(("user", "Which way?"), ("assistant", call)),
        *(("tool", "a wall"), ("assistant", call)),
        *(("tool", "a wall"), ("assistant", call)),
    ]
    assert messages[0]["role"] == "system"
    assert "look" in messages[0]["content"]
    (row,) = read_rows(path, tokenizer=tokenizer, max_tokens=2000, key="k")
    assert row.token_ids.tolist() == [each for part, _ in parts for each in part]


# Nemotron-Nano-v2's: results are in a user's message, and an answer ends with a line break.
RESULTS = (
    "{% for t in tools or [] %}{{ t.function.name }}\n{% endfor %}{% for m in messages %}<|head|>"
    "{{ 'user' if m.role == 'tool' else m.role }}\n{% if m.role == 'tool' %}<result>"
    "{{ m.content }}</result>{% else %}{{ m.content }}{% endif %}{% for c in m.tool_calls or [] %}"
    '<call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "</call>{% endfor %}\n<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant\n<think>\n{% endif %}"
)
LOOK = '<call>{"name": "look", "arguments": {}}</call>'


@pytest.mark.parametrize("is_cut", [True, False])
def test_past_answers_without_thoughts_are_split(is_cut: bool, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(RESULTS, eos="<|end|>", special=["<|head|>"])
    render = ToolRenderer(tokenizer, env="x").of("house", TOOLS)
    thought = "Left?" if is_cut else "Left?\n</think>\n\n"
    end = [] if is_cut else ids_of(tokenizer, "<|end|>")
    answer = [*ids_of(tokenizer, thought + ("" if is_cut else f"{LOOK}\n")), *end]
    shown, kept = render.without_thoughts(render.first_prompt("Which way?"), answer)
    last = ids_of(tokenizer, f"Why?\n</think>\n\n{LOOK}\n<|end|>")
    after = render.after_action("a wall", is_stopped=not is_cut, end=end[0] if end else None)
    path = exported(tmp_path, tokenizer, [([*shown, *kept, *after], 0), (last, 1)])
    told = [(each["role"], each["content"].strip()) for each in record_of(path)["messages"][1:]]
    assert told == [
        *(("user", "Which way?"), ("assistant", "" if is_cut else LOOK)),
        *(("tool", "a wall"), ("assistant", f"Why?\n</think>\n\n{LOOK}")),
    ]


def test_last_observation_is_in_all_formats(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(TWICE, eos="<|end|>", special=OF_TWICE)
    render = Renderer(tokenizer)
    answer = ids_of(tokenizer, "go left\n<|end|>")
    first = render.first_prompt("Which way?")
    after = render.after_action("a wall", is_stopped=True, end=answer[-1])
    ids = [*first, *answer, *after]
    mask = [0] * len(first) + [1] * len(answer) + [0] * len(after)
    for format in ("sft", "agenttraj", "atif"):
        path = tmp_path / f"{format}.jsonl"
        write(format, path, [of_tokens(ids, mask)], Framing(tokenizer))
        (row,) = read_rows(path, tokenizer=tokenizer, max_tokens=1000, key="k")
        assert (row.token_ids.tolist(), row.mask.astype(int).tolist()) == (ids, mask), format


def test_other_template_reads_the_texts_and_not_the_tokens(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(TWICE, eos="<|end|>", special=OF_TWICE)
    render = Renderer(tokenizer)
    first = render.first_prompt("Which way?")
    answer = ids_of(tokenizer, "go left")  # A cut answer, without its end.
    path = exported(tmp_path, tokenizer, [(first, 0), (answer, 1)])
    (row,) = read_rows(path, tokenizer=tokenizer, max_tokens=1000, key="k")
    assert row.token_ids.tolist() == [*first, *answer]
    for other in (TWICE.replace("<|assistant|>\n", "<|assistant|>"), TWICE):
        fix_template(None, {} if other != TWICE else {"mode": 1})
        own = byte_tokenizer(other, eos="<|end|>", special=OF_TWICE)
        (row,) = read_rows(path, tokenizer=own, max_tokens=1000, key="k")
        learnt = str(tokenizer.decode(row.token_ids[row.mask].tolist()))
        assert learnt.lstrip() == "go left\n<|end|>"


def test_tokens_of_another_template_are_refused_with_both_texts(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(TWICE, eos="<|end|>", special=OF_TWICE)
    words = r"'hello' stands in the place of '<\|user\|>\\n'; use format=json"
    with pytest.raises(ConfigError, match=words):
        exported(tmp_path, tokenizer, [(ids_of(tokenizer, "hello"), 0), ([65], 1)])
