"""Passages of a corpus, and the text of search results for the agent."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from envhub.env import Style

MAX_PASSAGE_CHARS = 4000  # A passage of Wikipedia's usual split has 600.


@dataclass(frozen=True, slots=True)
class Passage:
    """One passage of the corpus."""

    title: str
    text: str


class Retriever(Protocol):
    """Finds passages. Many threads may call it concurrently."""

    def search(self, query: str, num_passages: int) -> list[Passage]:
        """Return at most `num_passages` passages, best first; [] if none fits.

        Raises: EnvFailure: the search itself failed.
        """
        ...


def make_passage(row: object) -> Passage:
    """Return the passage of a corpus row.

    A row is {id, contents}, with the title as the first line, or {title, text}.

    Raises: ValueError: neither form.
    """
    if isinstance(row, Mapping):
        contents = row.get("contents")
        title = row.get("title")
        text = row.get("text")
        if isinstance(contents, str):
            first, _, rest = contents.partition("\n")
            return Passage(first.strip(), rest.strip()[:MAX_PASSAGE_CHARS])
        if isinstance(text, str) and isinstance(title, str | None):
            return Passage((title or "").strip(), text.strip()[:MAX_PASSAGE_CHARS])
    raise ValueError("a passage must have the fields id and contents, or title and text")


def read_passage(line: str | bytes) -> Passage:
    """Return the passage of one line of a corpus file.

    Raises: ValueError: no JSON, or no passage.
    """
    return make_passage(json.loads(line))


def worded(passages: Sequence[Passage], style: Style) -> str:
    """Return search results in the text form of observations."""
    if not passages:
        return "<information>No results.</information>"
    if style is Style.COMPACT:
        lines = [f"{one.title}: {' '.join(one.text.split())}" for one in passages]
    else:
        lines = [
            f"Doc {number}(Title: {one.title}) {one.text}"
            for number, one in enumerate(passages, start=1)
        ]
    return "<information>" + "\n".join(lines) + "</information>"
