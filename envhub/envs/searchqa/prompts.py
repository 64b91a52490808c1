"""What the agent is told: the instruction, the question and the answers to its actions."""

from envhub.env import Style
from envhub.envs.searchqa.questions import Question
from envhub.tables import read_instructions

FINAL = {
    True: "If the answer turns out to be wrong you may search on and answer again.",
    False: "You may answer only once.",
}

TEXTS = read_instructions(__file__)
WORDS = {
    Style.COMPACT: {"right": "correct", "wrong": "incorrect", "invalid": "invalid action"},
    Style.AGENTGYM: {
        "right": "Congratulations! You have answered the question correctly.",
        "wrong": "Sorry, your answer is incorrect.",
        "invalid": (
            "Your previous action is invalid. If you want to search, you should put the query "
            "between <search> and </search>. If you want to give the final answer, you should put "
            "the answer between <answer> and </answer>. Please try again."
        ),
    },
}
AGAIN = {Style.COMPACT: "; try again", Style.AGENTGYM: " Please try again."}


def instructions(*, is_retry: bool) -> dict[Style, str]:
    """Return the instruction of each style."""
    return {style: text.replace("{final}", FINAL[is_retry]) for style, text in TEXTS.items()}


def first_observation(question: Question, style: Style, *, is_retry: bool) -> str:
    """Return the question as the agent first sees it."""
    if style is Style.COMPACT:
        return f"question: {question.text}"
    return f"{instructions(is_retry=is_retry)[style]}\nQuestion: {question.text}"


def verdict(style: Style, *, is_right: bool, is_retry: bool) -> str:
    """Return what the agent is told about its answer."""
    words = WORDS[style]
    if is_right:
        return words["right"]
    return words["wrong"] + (AGAIN[style] if is_retry else "")
