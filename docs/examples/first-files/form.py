"""A reward over the group: the similarity of an episode's text to an answer in aider's form."""

from difflib import SequenceMatcher

FENCE = "```"
WANTED = f"name\n{FENCE}\ncontent\n{FENCE}\n"


def similarity(completions):
    """Return the similarity of the answers of each member to a listing of a file, in [0, 1]."""
    return [SequenceMatcher(None, text_of(answer), WANTED).ratio() for answer in completions]


def text_of(answer):
    """Return the texts of the answers of an episode."""
    if isinstance(answer, str):
        return answer
    return "\n".join(message["content"] for message in answer)
