"""Laws of supervised rows and exports with the chat templates of published models."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actor.formats.renderer import Renderer
from actor.rollout.context import History, Room, Tape, Turn
from common.config.actor import AgentOptions, KeepThinking
from common.errors import ConfigError
from tests.actor.formats.trl_templates import PICTURES, names, tokenizer_of
from tests.tools.exchange.test_round_trip import of_tokens
from tools.exchange.agent_traj import Conversation, read_conversations
from tools.exchange.writing import Framing, write
from tools.offline.rows import Row, num_episodes, read_rows, row_of_conversation

TEXTS = ["Which way?", "go left", "a wall <|im_end|>", "open it"]
THOUGHT = "<think>\nThe door is to the left.\n</think>\n\n"
TOOL = {
    "type": "function",
    "function": {
        "name": "go",
        "description": "moves",
        "parameters": {"type": "object", "properties": {"to": {"type": "string"}}},
    },
}
CALL = {"type": "function", "function": {"name": "go", "arguments": {"to": "kitchen"}}}


ACCEPTED = sorted(set(names()) - set(PICTURES))
ANY_TEMPLATE = pytest.mark.parametrize("name", ACCEPTED)


def record_of(texts: list[str], **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"messages": messages, **more}


def conversation(tmp_path: Path, record: dict[str, Any]) -> Conversation:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(record), encoding="utf-8")
    (found,) = read_conversations(path)
    return found


def learnt(tokenizer: Any, row: Row) -> str:
    return tokenizer.decode(row.token_ids[row.mask].tolist())


def played(renderer: Renderer, tokenizer: Any, answers: list[str]) -> tuple[list[int], list[int]]:
    """Return tokens and mask of a rollout that samples these answers."""
    ids: list[int] = []
    mask: list[int] = []
    end = renderer.sampled_end(has_calls=False)
    for number, answer in enumerate(answers):
        text = TEXTS[2 * number]
        seen = renderer.after_turn(text, is_stopped=True, end=end) if ids else []
        prompt = seen or renderer.first_prompt(text)
        own = [*tokenizer.encode(answer, add_special_tokens=False), end]
        ids += [*prompt, *own]
        mask += [0] * len(prompt) + [1] * len(own)
    return ids, mask


def played_with(
    renderer: Renderer, texts: list[str], answers: list[list[int]], keep: KeepThinking
) -> Tape:
    """Return the tape of an episode in which the policy samples these answers."""
    options = AgentOptions(keep_thinking=keep)
    history = History(renderer, Room(max_tokens=100_000, turn_tokens=1_000, options=options))

    async def never() -> Turn:
        raise AssertionError

    async def play() -> None:
        await history.begin(texts[0], renderer.first_prompt, never)
        for turn, (ids, shown) in enumerate(zip(answers, texts[2::2], strict=True)):
            taken = Turn(ids, [-1.0] * len(ids), [0] * len(ids))
            history.tape.add(taken, turn)
            if turn + 1 < len(answers):
                assert await history.go_on(shown, taken, turn + 1, never)
            else:
                history.last(shown, taken, turn)

    asyncio.run(play())
    return history.tape


def to_last_answer(ids: list[int], mask: list[bool]) -> tuple[list[int], list[bool]]:
    """Return tokens and mask up to the last sampled token. The rest is not trained."""
    num = max((place + 1 for place, is_sampled in enumerate(mask) if is_sampled), default=0)
    return ids[:num], mask[:num]


def plain_answers(renderer: Renderer) -> list[str]:
    """Return the answers as a policy of this template samples them, without thoughts."""
    has_messages = bool(renderer.thoughts.between)
    head = renderer.turns.answered if has_messages else ""
    return [head + text for text in TEXTS[1::2]]


def asks_for_thoughts(renderer: Renderer) -> bool:
    """Return whether the generation prompt begins thoughts that the answer must end."""
    asked = renderer.turns.after_user
    return asked.rfind("<think>") > asked.rfind("</think>")


@ANY_TEMPLATE
def test_rows_equal_a_rollout_of_the_same_answers(name: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(name)
    renderer = Renderer(tokenizer)
    row = row_of_conversation(tokenizer, conversation(tmp_path, record_of(TEXTS)))
    answers = plain_answers(renderer)
    end = str(tokenizer.decode([renderer.sampled_end(has_calls=False)]))
    assert learnt(tokenizer, row) == "".join(answer + end for answer in answers)
    if not asks_for_thoughts(renderer):
        ids, mask = played(renderer, tokenizer, answers)
        assert (row.token_ids.tolist(), row.mask.astype(int).tolist()) == (ids, mask)
        return
    # The record lacks the thoughts. Their end is in the row, and is not learnt.
    prompt = str(tokenizer.decode(row.token_ids[: int(row.mask.argmax())].tolist()))
    asked, opens, _ = str(tokenizer.decode(renderer.first_prompt(TEXTS[0]))).rpartition("<think>")
    assert prompt.startswith(asked)
    assert opens
    assert prompt.removeprefix(asked).strip().endswith("</think>")


@pytest.mark.parametrize("keep", [KeepThinking.LAST, KeepThinking.NONE])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "glm4moe", "nemotron_3_nano", "gptoss"])
def test_rows_have_the_segments_of_a_rollout(name: str, keep: KeepThinking, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(name)
    texts = [*TEXTS, "a door", "go on", "the end"]
    record = record_of(texts)
    for each in record["messages"][1:6:2]:
        each["reasoning_content"] = f"Why {each['content']}?"
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(record), encoding="utf-8")
    how: dict[str, Any] = {"tokenizer": tokenizer, "max_tokens": 10_000, "key": "k"}
    whole, *_ = read_rows(path, **how)
    ids = whole.token_ids.tolist()
    edges = np.flatnonzero(np.diff(whole.mask.astype(int), prepend=0, append=0)).tolist()
    answers = [ids[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)]
    tape = played_with(Renderer(tokenizer), texts, answers, keep)
    rows = read_rows(path, **how, keep_thinking=keep)
    columns = tape.columns()
    ends = [*tape.starts[1:], tape.num_tokens]
    parts = [slice(a, b) for a, b in zip(tape.starts, ends, strict=True)]
    is_learnt = columns["loss_mask"].tolist()
    token_ids = columns["token_ids"].tolist()
    played = [to_last_answer(token_ids[part], is_learnt[part]) for part in parts]
    if not any(is_learnt[parts[-1]]):  # The prompt of a turn that was not played.
        del played[-1]
    assert [to_last_answer(row.token_ids.tolist(), row.mask.tolist()) for row in rows] == played
    num = {KeepThinking.LAST: 2, KeepThinking.NONE: 3}[keep]
    assert [(row.segment, row.num_segments) for row in rows] == [(i, num) for i in range(num)]
    assert num_episodes(rows) == 1


@ANY_TEMPLATE
@pytest.mark.parametrize("format", ["sft", "agenttraj", "atif"])
def test_exported_episodes_are_read_as_the_same_tokens(
    name: str, format: str, tmp_path: Path
) -> None:
    tokenizer = tokenizer_of(name)
    renderer = Renderer(tokenizer)
    answers = plain_answers(renderer)
    if asks_for_thoughts(renderer):
        answers = [f"The door.\n</think>\n\n{text}" for text in answers]
    elif not renderer.thoughts.between and not renderer.turns.asked:
        answers = [THOUGHT + text for text in answers]
    ids, mask = played(renderer, tokenizer, answers)
    path = tmp_path / "out.jsonl"
    write(format, path, [of_tokens(ids, mask)], Framing(tokenizer))
    (row,) = read_rows(path, tokenizer=tokenizer, max_tokens=10_000, key="k")
    assert row.token_ids[row.mask].tolist() == np.array(ids)[np.array(mask, bool)].tolist()
    assert row.token_ids.tolist() == ids


@ANY_TEMPLATE
def test_calls_are_learnt_or_refused_by_record(name: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(name)
    renderer = Renderer(tokenizer)
    messages = [
        {"role": "user", "content": "Get the key."},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "name": "go", "content": "a key"},
        {"role": "assistant", "content": "I have it."},
    ]
    told = conversation(tmp_path, {"messages": messages, "tools": [TOOL]})
    if isinstance(renderer.calls, str):
        with pytest.raises(ConfigError, match=r"rows\.jsonl: record 1: tool_calls: "):
            row_of_conversation(tokenizer, told)
        return
    row = row_of_conversation(tokenizer, told)
    text = learnt(tokenizer, row)
    assert "kitchen" in text
    assert "I have it." in text
    assert "a key" not in text


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "assistant", "content": [{"type": "image_url"}]}, "'content' has parts of type"),
        ({"role": "assistant", "content": None}, "'content' is NoneType"),
        ({"role": "assistant", "content": 3}, "'content' is int"),
        ({"role": "critic", "content": "no"}, "'role' is 'critic'"),
        ({"role": "assistant", "content": "", "tool_calls": "go"}, "'tool_calls' must be a list"),
        ({"role": "assistant", "content": "", "tool_calls": [{}]}, r"tool_calls\[0\]: must have"),
        ({"role": "assistant", "content": "x", "function_call": {"name": "f"}}, "'function_call'"),
    ],
)
def test_unreadable_message_is_refused_by_record_and_field(
    message: dict[str, Any], field: str, tmp_path: Path
) -> None:
    record = {"messages": [{"role": "user", "content": "go"}, message]}
    with pytest.raises(ConfigError, match=rf"rows\.jsonl: record 1: {field}"):
        row_of_conversation(tokenizer_of("qwen3"), conversation(tmp_path, record))


@pytest.mark.parametrize(
    ("name", "is_shown"), [("qwen3", True), ("glm4moe", False), ("deepseekv3", False)]
)
def test_late_system_message_is_shown_or_refused(name: str, is_shown: bool, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(name)
    record = record_of(TEXTS)
    record["messages"].insert(2, {"role": "system", "content": "Be brief."})
    told = conversation(tmp_path, record)
    if is_shown:
        assert "Be brief." in tokenizer.decode(row_of_conversation(tokenizer, told).token_ids)
        return
    with pytest.raises(ConfigError, match=r"record 1: .* moves the system message 'Be brief\.'"):
        row_of_conversation(tokenizer, told)


def test_names_of_ends_in_calls_are_letters(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("qwen3")
    given = {"to": "a <|im_end|> b"}
    call = {"type": "function", "function": {"name": "go", "arguments": given}}
    messages = [
        {"role": "user", "content": "Get the key."},
        {"role": "assistant", "content": "So: <|im_end|>", "tool_calls": [call]},
    ]
    row = row_of_conversation(tokenizer, conversation(tmp_path, {"messages": messages}))
    assert learnt(tokenizer, row).count("<|im_end|>") == 3
    ends = row.token_ids[row.mask] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert ends.tolist() == [False] * (len(ends) - 1) + [True]


@pytest.mark.parametrize("weight", [0.5, "1", True])
def test_weight_of_a_message_is_zero_or_one(weight: object, tmp_path: Path) -> None:
    record = record_of(TEXTS[:2])
    record["messages"][1]["weight"] = weight
    with pytest.raises(ConfigError, match=r"record 1: 'weight' is .*; it must be 0 or 1"):
        conversation(tmp_path, record)


def test_half_characters_in_thoughts_and_calls_are_replaced(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("qwen3")
    call = {"type": "function", "function": {"name": "go", "arguments": '{"to": "\\ud800"}'}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    answer["reasoning_content"] = "Left\ud800"
    messages = [{"role": "user", "content": "Which way?"}, answer]
    row = row_of_conversation(tokenizer, conversation(tmp_path, {"messages": messages}))
    assert learnt(tokenizer, row).count("\ufffd") == 2


def test_thoughts_of_a_field_are_learnt_like_the_template_writes_them(tmp_path: Path) -> None:
    record = record_of(TEXTS[:2])
    record["messages"][1]["reasoning_content"] = "The door is to the left."
    row = row_of_conversation(tokenizer_of("qwen3"), conversation(tmp_path, record))
    assert learnt(tokenizer_of("qwen3"), row) == f"{THOUGHT}go left<|im_end|>"


def test_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(record_of(TEXTS)), encoding="utf-8-sig")
    assert len(read_conversations(path)) == 1
