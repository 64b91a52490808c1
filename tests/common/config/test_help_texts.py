"""Laws of the help texts of keys: each can be read alone, and no row repeats itself."""

import re

from tools.cli.help import AllKeys, reference_text, walk_keys

BANNED = re.compile(
    r"\b(likewise|the same for|which 0 means|nobody|whoever|told|tells|says)\b", re.I
)
VERB = re.compile(r"(With .*?, )?[A-Za-z]+s ")  # The first word is a verb: "Sets", "Limits".
SMALL_WORDS = frozenset(["a", "an", "and", "in", "is", "of", "on", "or", "the", "that", "to"])
TEXTS = {key: field.metadata["text"] for key, _, field in walk_keys(AllKeys, "")}


def test_help_text_is_whole_sentences() -> None:
    for text in TEXTS.values():
        assert VERB.match(text), text
        assert re.match(r"[A-Z0-9]", text), text
        assert text.endswith("."), text
        assert len(text.split()) >= 3, text


def test_help_texts_stand_alone() -> None:
    assert {key: text for key, text in TEXTS.items() if BANNED.search(text)} == {}


def test_no_row_of_the_reference_repeats_a_sentence() -> None:
    rows = [line.split(" | ") for line in reference_text().splitlines() if line.startswith("| `")]
    assert len(rows) > 400
    assert [row[0] for row in rows if repeats(" | ".join(row[3:]))] == []


def repeats(text: str) -> bool:
    """Return whether all words of one sentence, at least two, are in another sentence."""
    sentences = [words_of(each) for each in re.split(r"(?<=[.;]) ", text.rstrip(" |"))]
    long = [each for each in sentences if len(each) >= 2]
    return any(one <= other for i, one in enumerate(long) for j, other in enumerate(long) if i != j)


def words_of(sentence: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z_0-9]+", sentence.lower())) - SMALL_WORDS


def test_repetition_of_a_sentence_is_found() -> None:
    assert repeats("Selects the attention kernels. Attention kernels. fused: flash attention.")
    assert not repeats("Selects the attention kernels. fused: flash attention.")
