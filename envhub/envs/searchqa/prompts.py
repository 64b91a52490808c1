"""What the agent is told: the instruction, the question and the answers to its actions."""

from typing import Any

from envhub.agentgym.conversations import CONVERSATIONS, begun
from envhub.env import Style
from envhub.envs.searchqa.questions import Question
from envhub.tables import read_instructions, read_table

TEXTS = read_instructions(__file__)
_TABLE = read_table(__file__, "prompts.yaml")
FINAL: dict[bool, str] = _TABLE["final"]
WORDS: dict[Style, dict[str, str]] = {Style(name): each for name, each in _TABLE["words"].items()}


def instructions(*, is_retry: bool) -> dict[Style, str]:
    """Return the instruction of each style."""
    return {style: text.replace("{final}", FINAL[is_retry]) for style, text in TEXTS.items()}


def opening(*, is_retry: bool) -> dict[str, Any]:
    """Return how conversations begin; in AgentGym's style as its clients begin them."""
    return begun("searchqa", instructions(is_retry=is_retry))


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
