"""Parser of the agent's text: a search, an answer or neither."""

from dataclasses import dataclass
from enum import StrEnum


class ActionTag(StrEnum):
    """The kinds of action, with the names of their tags."""

    SEARCH = "search"
    ANSWER = "answer"


@dataclass(frozen=True, slots=True)
class TaggedAction:
    """A search for `text`, or `text` as the final answer."""

    kind: ActionTag
    text: str


def parse(text: str) -> TaggedAction | None:
    """Return the action of an agent's turn; None if there is none.

    The first closed <search> or <answer> decides the kind. If there are several answers, the last
    one counts. Tags are found by plain search, in time linear in the text, even if they are nested.
    """
    blocks = [(_first(text, kind), kind) for kind in ActionTag]
    found = [(block, kind) for block, kind in blocks if block is not None]
    if not found:
        return None
    (_, content), kind = min(found)
    if kind is ActionTag.ANSWER:
        content = _last(text, kind)
    return TaggedAction(kind, content.strip())


def _first(text: str, kind: ActionTag, start: int = 0) -> tuple[int, str] | None:
    """Return position and content of the first closed block from `start` on."""
    opening = f"<{kind}>"
    closing = f"</{kind}>"
    begin = text.find(opening, start)
    if begin < 0:
        return None
    end = text.find(closing, begin + len(opening))
    return None if end < 0 else (begin, text[begin + len(opening) : end])


def _last(text: str, kind: ActionTag) -> str:
    """Return the content of the last block of a kind, "" for none."""
    start = 0
    content = ""
    while (block := _first(text, kind, start)) is not None:
        start = block[0] + 2 * len(kind) + 5 + len(block[1])
        content = block[1]
    return content
