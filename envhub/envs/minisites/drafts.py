"""What a task template yields: an intent, its check, and a way to do it."""

import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

Step = dict[str, str | bool]
Check = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """One task of a template, on one world.

    Attributes:
        check: WebArena's `eval` part.
        path: what an expert does, from the site's first page; the closing `stop` included.
    """

    intent: str
    check: Mapping[str, object]
    path: tuple[Step, ...]


Template = Callable[[sqlite3.Connection, Random], Iterator[Draft]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """A subset's site, database and templates."""

    host: str
    site: str  # as WebArena's configurations name it
    database: str
    templates: Sequence[Template]


def says(answer: str) -> Check:
    """Returns the check of an answer that must be this one, letter case aside."""
    return _check(["string_match"], answers={"exact_match": answer})


def says_all(parts: Sequence[str]) -> Check:
    """Returns the check of an answer that must name all of these."""
    return _check(["string_match"], answers={"must_include": list(parts)})


def ends_at(url: str) -> Check:
    """Returns the check of the page on which the episode ends."""
    return _check(["url_match"], url=url)


def shows(url: str, element: str, *, exact: str = "", parts: Sequence[str] = ()) -> Check:
    """Returns the check of what an element of a page, named by its HTML id, says at the end."""
    contents = {"must_include": list(parts)} if parts else {"exact_match": exact}
    page = {
        "url": url,
        "locator": f"document.querySelector('#{element}')?.outerText ?? ''",
        "required_contents": contents,
    }
    return _check(["program_html"], pages=[page])


def both(first: Check, second: Check) -> Check:
    """Returns the check that demands two things; at most one of them an answer or a URL."""
    kinds = [*_list(first["eval_types"]), *_list(second["eval_types"])]
    return {
        "eval_types": list(dict.fromkeys(kinds)),
        "reference_answers": first["reference_answers"] or second["reference_answers"],
        "reference_url": first["reference_url"] or second["reference_url"],
        "url_note": "GOLD in PRED",
        "program_html": [*_list(first["program_html"]), *_list(second["program_html"])],
    }


def _list(value: object) -> list[object]:
    assert isinstance(value, list)
    return value


def _check(
    kinds: list[str],
    answers: Mapping[str, object] | None = None,
    url: str = "",
    pages: Sequence[Mapping[str, object]] = (),
) -> Check:
    return {
        "eval_types": kinds,
        "reference_answers": answers,
        "reference_url": url,
        "url_note": "GOLD in PRED",
        "program_html": list(pages),
    }


def click(role: str, name: str) -> Step:
    """Returns the step that clicks the element of this role and accessible name."""
    return {"do": "click", "role": role, "name": name}


def link(name: str) -> Step:
    """Returns the step that follows a link."""
    return click("link", name)


def button(name: str) -> Step:
    """Returns the step that presses a button."""
    return click("button", name)


def fill(name: str, text: str, *, role: str = "textbox", enter: bool = False) -> Step:
    """Returns the step that replaces a field's text, and sends its form if `enter`."""
    return {"do": "type", "role": role, "name": name, "text": text, "enter": enter}


def seek(name: str, words: str) -> Step:
    """Returns the step that uses a search field."""
    return fill(name, words, role="searchbox", enter=True)


def stop(answer: str = "") -> Step:
    """Returns the closing step."""
    return {"do": "stop", "answer": answer}


def some(random: Random, rows: Sequence[sqlite3.Row], most: int = 40) -> list[sqlite3.Row]:
    """Returns at most `most` of the rows, in a random order."""
    return random.sample(list(rows), min(most, len(rows)))
