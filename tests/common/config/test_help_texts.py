"""Laws of the help texts of keys: each can be read alone."""

import re

import pytest

from common.config.help import walk_keys
from common.config.run_config import RunConfig

BANNED = re.compile(
    r"\b(likewise|the same for|which 0 means|nobody|whoever|told|tells|says)\b", re.I
)
TEXTS = {key: field.metadata["text"] for key, _, field in walk_keys(RunConfig, "")}


@pytest.mark.parametrize("key", TEXTS)
def test_help_text_is_whole_sentences(key: str) -> None:
    text = TEXTS[key]
    assert re.match(r"[A-Z0-9]", text), text
    assert text.endswith("."), text
    assert len(text.split()) >= 3, text


def test_help_texts_stand_alone() -> None:
    assert {key: text for key, text in TEXTS.items() if BANNED.search(text)} == {}
