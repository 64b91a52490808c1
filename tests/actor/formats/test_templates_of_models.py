"""Laws of rendering with the chat templates of published models, from trl's wheel."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from actor.formats.renderer import Renderer, with_ids
from actor.rollout.context import History, Room, Tape, Turn
from common.config.actor import AgentOptions, KeepThinking
from common.errors import ConfigError
from common.formats.chat_template import render_chat
from tests.actor.formats.trl_templates import PICTURES, byte_tokenizer, names, tokenizer_of

ANY_TEMPLATE = pytest.mark.parametrize("name", sorted(set(names()) - set(PICTURES)))
OBSERVATIONS = ["Which way?", "a wall <|im_end|>", "a door"]
ACTIONS = ["go left", "open it"]
Message = dict[str, Any]


def conversation(answers: Sequence[str]) -> list[Message]:
    told: list[Message] = [{"role": "user", "content": OBSERVATIONS[0]}]
    for answer, observation in zip(answers, OBSERVATIONS[1:], strict=False):
        told.append({"role": "assistant", "content": answer})
        told.append({"role": "user", "content": observation})
    return told


def rendered(tokenizer: PreTrainedTokenizerFast, messages: list[Message]) -> list[int]:
    """The template's rendering, encoded at once. Letters of a control token stay letters."""
    marked = [{**each, "content": each["content"].replace("<|im", "<\x00|im")} for each in messages]
    text = render_chat(tokenizer, with_ids(marked))
    pieces = text.split("\x00")
    return [i for each in pieces for i in tokenizer.encode(each, add_special_tokens=False)]


def played(renderer: Renderer, answers: Sequence[list[int]], keep: KeepThinking) -> Tape:
    """Return the tape of an episode with these sampled answers."""
    options = AgentOptions(keep_thinking=keep)
    history = History(renderer, Room(max_tokens=100_000, turn_tokens=1_000, options=options))

    async def never() -> Turn:
        raise AssertionError

    async def play() -> None:
        await history.begin(OBSERVATIONS[0], renderer.first_prompt, never)
        for turn, (ids, shown) in enumerate(zip(answers, OBSERVATIONS[1:], strict=True)):
            taken = Turn(ids, [-1.0] * len(ids), [0] * len(ids))
            history.tape.add(taken, turn)
            assert await history.go_on(shown, taken, turn + 1, never)

    asyncio.run(play())
    return history.tape


def sampled(renderer: Renderer, thought: str, action: str) -> list[int]:
    """Return an answer as a model of this template samples it."""
    form = renderer.thoughts
    if form.between:  # Thoughts and answer are messages of their own.
        told = f"{form.opens}{thought}{form.between}" if thought else ""
        text = f"{told}{renderer._sampled.encoded(renderer.turns.answered)}{action}"
        text = text.replace("\udc02", "").replace("\udc03", "")
    else:
        (opens, closes), *_ = form.blocks
        opens, closes = (m.replace("\udc02", "").replace("\udc03", "") for m in (opens, closes))
        is_open = form.asked.rfind(opens) > form.asked.rfind(closes)
        start = "" if is_open else f"{opens}\n"
        needs = thought or is_open
        text = f"{start}{thought}\n{closes}\n\n{action}" if needs else action
    return [*renderer.completion(text), renderer.end_of_turn_ids[0]]


def between(renderer: Renderer, observation: str) -> list[int]:
    """The template's tokens from the first one after an answer's end up to the next answer."""
    told = [{"role": "user", "content": OBSERVATIONS[0]}, {"role": "assistant", "content": "ANSW"}]
    tokenizer = renderer.tokenizer
    whole = rendered(tokenizer, [*told, {"role": "user", "content": observation}])
    mark = renderer.completion("ANSW")
    start = next(i for i in range(len(whole)) if whole[i : i + len(mark)] == mark)
    return whole[start + len(mark) + 1 :]


@pytest.mark.slow
def test_only_templates_of_pictures_are_refused() -> None:
    refused: dict[str, str] = {}
    for name in names():
        try:
            Renderer(tokenizer_of(name))
        except ConfigError as error:
            refused[name] = str(error)
    assert sorted(refused) == sorted(PICTURES)
    for why in refused.values():
        assert "shows content as a list of parts only" in why
        assert "model.chat_template" in why


@ANY_TEMPLATE
@pytest.mark.parametrize("thought", ["", "Left or right?"])
def test_context_without_thoughts_equals_the_template(name: str, thought: str) -> None:
    tokenizer = tokenizer_of(name)
    renderer = Renderer(tokenizer)
    answers = [sampled(renderer, thought, action) for action in ACTIONS]
    tape = played(renderer, answers, KeepThinking.NONE)
    assert tape.context == rendered(tokenizer, conversation(ACTIONS))
    assert [renderer.action_text(each) for each in answers] == ACTIONS


@ANY_TEMPLATE
def test_kept_answers_stay_as_sampled_in_one_segment(name: str) -> None:
    renderer = Renderer(tokenizer_of(name))
    answers = [sampled(renderer, "Left?", action) for action in ACTIONS]
    tape = played(renderer, answers, KeepThinking.ALL)
    assert tape.starts == [0]
    learnt = [i for i, is_learnt in zip(tape.token_ids, tape.loss_mask, strict=True) if is_learnt]
    assert learnt == [i for each in answers for i in each]
    expected = renderer.first_prompt(OBSERVATIONS[0])
    for answer, shown in zip(answers, OBSERVATIONS[1:], strict=True):
        expected += [*answer, *between(renderer, shown)]
    assert list(tape.token_ids) == expected


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "glm4moe", "gptoss", "gemma4_v5"])
def test_last_thoughts_stand_until_the_next_answer(name: str) -> None:
    renderer = Renderer(tokenizer_of(name))
    answers = [sampled(renderer, f"Why {action}?", action) for action in ACTIONS]
    tape = played(renderer, answers, KeepThinking.LAST)
    ids = tape.columns()["token_ids"].tolist()
    shown = [
        renderer.tokenizer.decode(ids[a:b])
        for a, b in zip(tape.starts, [*tape.starts[1:], len(ids)], strict=True)
    ]
    assert [("Why go left?" in each, "Why open it?" in each) for each in shown] == [
        (True, True),
        (False, True),
    ]


def test_whitespace_around_an_observation_follows_the_template() -> None:
    for name, is_kept in (("llama3", False), ("qwen3", True)):
        tokenizer = tokenizer_of(name)
        renderer = Renderer(tokenizer)
        told = [
            {"role": "user", "content": "  a\n"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "\n c "},
        ]
        ids = [*renderer.first_prompt("  a\n"), *renderer.completion("b")]
        ids += renderer.after_action("\n c ", is_stopped=False)
        assert ids == rendered(tokenizer, told)
        assert ("  a\n" in tokenizer.decode(ids)) is is_kept


END = "<|im_end|>"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TWO_ENDS = CHATML.replace("<|im_end|>", "<|end_response|><|im_end|>")
SPACED = (  # Mistral's: a space before a past answer.
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", [CHATML, TWO_ENDS])
def test_end_of_template_stands_once_after_any_sampled_end(template: str) -> None:
    special = ["<|im_start|>", "<|end_response|>", "<|im_end|>", "<|endoftext|>"]
    tokenizer = byte_tokenizer(template, eos="<|endoftext|>", special=special)
    renderer = Renderer(tokenizer)
    ends = [int(i) for i in map(tokenizer.get_vocab().__getitem__, special[1:])]
    whole = [END] if template is CHATML else ["<|end_response|>", END]
    assert tokenizer.convert_ids_to_tokens(renderer.end_of_turn_ids) == [whole[0], "<|endoftext|>"]
    for end in [None, *ends]:
        answer = [*renderer.completion("go"), *([] if end is None else [end])]
        turn = Turn(answer, [0.0] * len(answer), [0] * len(answer), is_stopped=end is not None)
        ids = [*answer, *renderer.after_action("a", is_stopped=turn.is_stopped, end=turn.end)]
        named = tokenizer.convert_ids_to_tokens(ids)
        shown = named[: named.index("<|im_start|>")]  # The observation has ends of its own.
        skips_first = template is TWO_ENDS and end == ends[1]
        assert [each for each in shown if each in whole] == whole[skips_first:]


def test_space_before_past_answers_is_no_rewriting() -> None:
    special = ["[INST]", "[/INST]", "</s>"]
    tokenizer = byte_tokenizer(SPACED, eos="</s>", special=special)
    renderer = Renderer(tokenizer)
    answers = [sampled(renderer, "", action) for action in ACTIONS]
    assert played(renderer, answers, KeepThinking.ALL).starts == [0]
    tape = played(renderer, answers, KeepThinking.NONE)
    assert tape.context == rendered(tokenizer, conversation(ACTIONS))
