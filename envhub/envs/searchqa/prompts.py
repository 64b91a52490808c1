"""Texts for the agent: the instruction, the question and the verdict on an answer."""

from typing import Any

from envhub.conversations import CONVERSATIONS, begun
from envhub.env import Style
from envhub.envs.searchqa.questions import SearchQuestion
from envhub.tables import read_instructions, read_table

TEXTS = read_instructions(__file__)
_TABLE = read_table(__file__, "prompts.yaml")
WORDS: dict[Style, dict[str, str]] = {Style(name): each for name, each in _TABLE["words"].items()}


def opening() -> dict[str, Any]:
    """Return the start of a conversation; AgentGym's style copies that of its clients."""
    return begun("searchqa", TEXTS)


def first_observation(question: SearchQuestion, style: Style) -> str:
    """Return the first observation, which is the question."""
    if style is Style.COMPACT:
        return f"question: {question.text}"
    return CONVERSATIONS["searchqa"].first_observation(question.text)


def verdict(style: Style, *, is_right: bool, is_retry: bool) -> str:
    """Return the observation after an answer."""
    words = WORDS[style]
    if is_right:
        return words["right"]
    return words["wrong"] + (words["again"] if is_retry else "")
