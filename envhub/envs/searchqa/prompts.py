"""What the agent is told: the instruction, the question and the answers to its actions."""

from typing import Any

from envhub.conversations import CONVERSATIONS, begun
from envhub.env import Style
from envhub.envs.searchqa.questions import Question
from envhub.tables import read_instructions, read_table

TEXTS = read_instructions(__file__)
_TABLE = read_table(__file__, "prompts.yaml")
WORDS: dict[Style, dict[str, str]] = {Style(name): each for name, each in _TABLE["words"].items()}


def opening() -> dict[str, Any]:
    """Return how conversations begin; in AgentGym's style as its clients begin them."""
    return begun("searchqa", TEXTS)


def first_observation(question: Question, style: Style) -> str:
    """Return the question as the agent first sees it."""
    if style is Style.COMPACT:
        return f"question: {question.text}"
    return CONVERSATIONS["searchqa"].first_observation(question.text)


def verdict(style: Style, *, is_right: bool, is_retry: bool) -> str:
    """Return what the agent is told about its answer."""
    words = WORDS[style]
    if is_right:
        return words["right"]
    return words["wrong"] + (words["again"] if is_retry else "")
