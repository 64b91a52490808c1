"""Laws of thoughts in an answer: which text of it remains, and which tokens."""

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from actor.formats.sampled import SampledText
from actor.formats.thoughts import ThoughtForm
from tests.actor.formats.trl_templates import byte_tokenizer

USUAL = ThoughtForm()
OPEN = ThoughtForm(asked="<|im_start|>assistant\n<think>\n")
CLOSED = ThoughtForm(asked="<|im_start|>assistant\n<think>\n\n</think>\n\n")
MESSAGES = ThoughtForm(
    between="\udc02<|end|>\udc03\udc02<|start|>\udc03assistant",
    opens="\udc02<|channel|>\udc03analysis\udc02<|message|>\udc03",
    head_end="\udc02<|message|>\udc03",
)
FINAL = "\udc02<|channel|>\udc03final\udc02<|message|>\udc03"


@pytest.mark.parametrize(
    ("form", "answer", "text", "thoughts"),
    [
        (USUAL, "go left", "go left", ""),
        (USUAL, "<think>\nAction: no\n</think>\n\ngo left", "\n\ngo left", "Action: no"),
        (USUAL, "<think>a</think>go <think>b</think>left", "go left", "ab"),
        (USUAL, "<think>it never ends", "", "it never ends"),
        (USUAL, "go left <think>it never ends", "go left ", "it never ends"),
        (USUAL, "no beginning</think>go left", "go left", "no beginning"),
        (USUAL, "", "", ""),
        (OPEN, "Why?\n</think>\n\ngo left", "\n\ngo left", "Why?"),
        (OPEN, "it never ends", "", "it never ends"),
        (OPEN, "", "", ""),
        (CLOSED, "go left", "go left", ""),
        (CLOSED, "<think>again</think>go left", "go left", "again"),
        (MESSAGES, f"{FINAL}go left", "go left", ""),
        (MESSAGES, f"{MESSAGES.opens}Why?{MESSAGES.between}{FINAL}go left", "go left", "Why?"),
        (MESSAGES, f"{MESSAGES.opens}it never ends", "", "it never ends"),
        (MESSAGES, "go left", "go left", ""),
    ],
)
def test_answer_is_its_text_without_thoughts(
    form: ThoughtForm, answer: str, text: str, thoughts: str
) -> None:
    assert form.text(answer) == text
    assert form.thoughts(answer) == thoughts


def test_letters_of_a_special_token_are_no_special_token() -> None:
    tokenizer = byte_tokenizer("", eos="<|end|>", special=["<|channel|>"])
    sampled = SampledText(tokenizer)
    special = tokenizer.encode("<|channel|>", add_special_tokens=False)
    letters = [i for c in "<|channel|>" for i in tokenizer.encode(c, add_special_tokens=False)]
    assert len(special) == 1
    assert sampled.marked([*special, *letters]) == "\udc02<|channel|>\udc03<|channel|>"


def test_tokens_of_a_text_are_counted_within_letters_and_tokens() -> None:
    tokenizer = byte_tokenizer("", eos="<|end|>", special=["<|channel|>"])
    sampled = SampledText(tokenizer)
    ids = tokenizer.encode("kü<|channel|>a</think>b", add_special_tokens=False)
    text = sampled.marked(ids)
    counts = {each: sampled.num_tokens(ids, text.index(each)) for each in ("ü", "a", "b")}
    assert counts == {"ü": 1, "a": 4, "b": 6}  # "ü" is two bytes, each tag one token.
    assert sampled.num_tokens(ids, len(text)) == len(ids) == 7


def test_growing_text_is_a_begin_of_the_whole_one_with_single_bytes() -> None:
    """A wrong byte makes the bytes before it unreadable, and some of them are letters."""
    vocab = {f"<0x{number:02X}>": number for number in range(256)} | {"cat": 256, "<unk>": 257}
    model = models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True)
    own = Tokenizer(model)
    own.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    sampled = SampledText(PreTrainedTokenizerFast(tokenizer_object=own, unk_token="<unk>"))
    for ids in (
        [*"é🙂".encode(), 0xE2, 256],
        [65, 0xE2],
        [256, *"é".encode(), 256, 10, *"é".encode()],
    ):
        growing = sampled.growing()
        for token_id in ids:
            growing.add([token_id])
            assert sampled.marked(ids).startswith(growing.text)
        assert growing.text == sampled.marked(ids) or ids[-1] < 256


def test_second_end_of_thoughts_hides_no_action() -> None:
    form = ThoughtForm(asked="<think>\n")
    assert form.text("Left?</think>go</think> left") == "go left"
    assert form.thoughts("Left?</think>go</think> left") == "Left?"
    assert ThoughtForm().text("Left?</think>go</think> left") == "go left"
