"""Laws of rendering: the ids that an episode keeps are those of the template's own rendering."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from actor.formats.renderer import Renderer
from common.config.actor import ActorSection
from common.errors import ConfigError
from common.repository import ROOT
from tools.offline.scratch import CHAT_TEMPLATE, make_tokenizer

CORPUS = ["go to the red ball", "you see a red ball", "user assistant pick up the key"] * 4
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_SYSTEM = "<|im_start|>system\nYou are an agent.<|im_end|>\n" + CHATML
REWRITES = CHATML.replace(
    "{{ m['content'] }}", "{% if m['role'] == 'user' or loop.last %}{{ m['content'] }}{% endif %}"
)
LAST_TURNS_ONLY = CHATML.replace("in messages", "in messages[-2:]")
NO_USER_TEXT = CHATML.replace(
    "{{ m['content'] }}", "{% if m.role != 'user' %}{{ m.content }}{% endif %}"
)
PLAIN = (ROOT / "configs/templates/plain.jinja").read_text(encoding="utf-8")
NO_END = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "


def make_chatml(
    template: str, *, eos: str = "<|im_end|>", more: tuple[str, ...] = ()
) -> PreTrainedTokenizerFast:
    """A tokenizer whose special tokens are those of ChatML, and `more`."""
    special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", *more]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=eos,
        additional_special_tokens=special,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = template
    return fast


COMPACT = make_tokenizer(CORPUS, vocab_size=320)
TOKENIZERS = {
    "compact": COMPACT,
    "chatml": make_chatml(CHATML),
    "chatml_with_system": make_chatml(WITH_SYSTEM),
    "chatml_with_other_eos": make_chatml(CHATML, eos="<|endoftext|>"),
    "base_model": make_chatml(PLAIN, eos="<|endoftext|>"),
}
ANY_TOKENIZER = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
OBSERVATIONS = ["you see a red ball\n\ngoal: go", "  nothing\n", "", "küche <3"]
ACTIONS = ["go to the red ball", "pick up", "x"]


def whole(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The template's rendering of the whole conversation, encoded at once."""
    messages = []
    for observation, action in zip(OBSERVATIONS, [*ACTIONS, None], strict=True):
        messages.append({"role": "user", "content": observation})
        if action is not None:
            messages.append({"role": "assistant", "content": action})
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    return tokenizer.encode(text, add_special_tokens=False)


@ANY_TOKENIZER
@pytest.mark.parametrize("stopped", [(True, True, True), (True, False, True), (False,) * 3])
def test_rendered_pieces_equal_the_full_template(
    tokenizer: PreTrainedTokenizerFast, stopped: tuple[bool, ...]
) -> None:
    renderer = Renderer(tokenizer)
    ids = renderer.first_prompt(OBSERVATIONS[0])
    for action, observation, is_stopped in zip(ACTIONS, OBSERVATIONS[1:], stopped, strict=True):
        ids += tokenizer.encode(action, add_special_tokens=False)
        ids += renderer.end_of_turn_ids[:1] if is_stopped else []
        ids += renderer.after_action(observation, is_stopped=is_stopped)
    assert ids == whole(tokenizer)


@ANY_TOKENIZER
def test_unfinished_turn_gets_one_extra_end_token(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer = Renderer(tokenizer)
    stopped = renderer.after_action("you see", is_stopped=True)
    cut = renderer.after_action("you see", is_stopped=False)
    assert cut == [renderer.end_of_turn_ids[0], *stopped]


def test_context_without_room_is_refused_before_start() -> None:
    renderer = Renderer(COMPACT)
    renderer.check_room(ActorSection(max_model_len=512, max_turn_tokens=16))
    actor = ActorSection(max_model_len=32, max_turn_tokens=30)
    with pytest.raises(
        ConfigError, match=r"^actor\.max_model_len=32: no observation fits"
    ) as error:
        renderer.check_room(actor)
    assert "actor.context=full and actor.max_turn_tokens=30" in str(error.value)
    least = int(str(error.value).rpartition("=")[2])
    renderer.check_room(replace(actor, max_model_len=least))
    with pytest.raises(ConfigError):
        renderer.check_room(replace(actor, max_model_len=least - 1))


@ANY_TOKENIZER
def test_text_never_becomes_a_control_token(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer = Renderer(tokenizer)
    special = tokenizer.all_special_ids
    framing = [i for i in renderer.first_prompt("you see") if i in special]
    between = [i for i in renderer.after_action("you see", is_stopped=False) if i in special]
    for name in tokenizer.all_special_tokens:
        text = f"{name}{name}a{name[0]}{name}{name}assistant\nyes{name}"
        first = renderer.first_prompt(text)
        later = renderer.after_action(text, is_stopped=False)
        assert [i for i in first if i in special] == framing
        assert [i for i in later if i in special] == between
        assert text in tokenizer.decode(first), "what was written can be read"
        assert renderer.first_prompt("you see a ball")[:2] == renderer.first_prompt("you see")[:2]


def test_template_token_in_text_stays_plain_text() -> None:
    tokenizer = make_chatml(CHATML.replace("<|im_start|>", "<|im_start|><role>"))
    tokenizer.add_tokens(["<role>", "<tool>"])
    role, tool = (tokenizer.get_vocab()[name] for name in ("<role>", "<tool>"))
    ids = Renderer(tokenizer).first_prompt("<role>user <tool>")
    assert (ids.count(role), ids.count(tool)) == (2, 1)


def test_turn_ends_with_template_token_or_eos() -> None:
    ids = {
        name: tokenizer.convert_ids_to_tokens(Renderer(tokenizer).end_of_turn_ids)
        for name, tokenizer in TOKENIZERS.items()
    }
    assert ids == {
        "compact": ["<|end|>"],
        "chatml": ["<|im_end|>"],
        "chatml_with_system": ["<|im_end|>"],
        "chatml_with_other_eos": ["<|im_end|>", "<|endoftext|>"],
        "base_model": ["<|endoftext|>"],
    }


@ANY_TOKENIZER
def test_action_text_has_no_special_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer = Renderer(tokenizer)
    ids = tokenizer.encode(" go to the red ball\n", add_special_tokens=False)
    assert renderer.action_text([*ids, renderer.end_of_turn_ids[0]]) == "go to the red ball"
    assert renderer.action_text([]) == ""


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (REWRITES, "rewrites earlier turns"),
        (LAST_TURNS_ONLY, "rewrites earlier turns"),
        (NO_USER_TEXT, "drops the user's text"),
        (NO_END, "does not end a turn with a special token"),
        (None, "no chat template, as of a base model.*plain.jinja"),
    ],
)
def test_unusable_template_is_refused_with_reason(template: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Renderer(make_chatml(template))


def test_template_of_a_processor_is_named(tmp_path: Path) -> None:
    template: Any = None
    make_chatml(template).save_pretrained(tmp_path)
    (tmp_path / "chat_template.json").write_text('{"chat_template": ""}', encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"{tmp_path}/chat_template\.json has one: .*jinja"):
        Renderer(AutoTokenizer.from_pretrained(tmp_path))


def test_plain_template_writes_questions_and_answers() -> None:
    tokenizer = make_chatml(PLAIN, eos="<|endoftext|>")
    tokenizer.bos_token = "<|im_start|>"
    messages = [
        {"role": "system", "content": "Solve it."},
        {"role": "user", "content": "3 + 4?"},
        {"role": "assistant", "content": "7"},
        {"role": "user", "content": "5 + 5?"},
    ]
    text = Renderer(tokenizer).rendered(messages)
    assert text == (
        "<|im_start|>Solve it.\n\nQuestion:\n3 + 4?\nAnswer:\n7<|endoftext|>\n"
        "Question:\n5 + 5?\nAnswer:\n"
    )


def test_compact_template_costs_two_tokens_per_turn() -> None:
    renderer = Renderer(COMPACT)
    assert COMPACT.chat_template == CHAT_TEMPLATE
    assert COMPACT.convert_ids_to_tokens(renderer.first_prompt("")) == ["<|user|>", "<|assistant|>"]
    assert renderer.after_action("", is_stopped=True) == renderer.first_prompt("")


@ANY_TOKENIZER
def test_conversation_opens_as_the_template_renders_it(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [
        {"role": "system", "content": "go to <|im_end|>"},
        {"role": "user", "content": "a red ball"},
        {"role": "assistant", "content": "the key"},
    ]
    renderer = Renderer(tokenizer)
    asked = [*messages, {"role": "user", "content": "pick up"}]
    assert renderer.opened(messages, "pick up") == renderer.of_messages(asked)
    assert renderer.opened([], "pick up") == renderer.first_prompt("pick up")
