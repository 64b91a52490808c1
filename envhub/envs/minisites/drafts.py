"""What a task template yields: an intent, its check, and a way to do it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Step = dict[str, str | bool]
Check = dict[str, Any]  # WebArena's `eval` part


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """One task of a template, on one world.

    `path`: what an expert does, from the site's first page; the closing `stop` included.
    """

    intent: str
    check: Check
    path: tuple[Step, ...]


def says(answer: str) -> Check:
    """Return the check of an answer that must be this one, letter case aside."""
    return _check("string_match", answers={"exact_match": answer})


def says_all(parts: Sequence[str]) -> Check:
    """Return the check of an answer that must name all of these."""
    return _check("string_match", answers={"must_include": list(parts)})


def ends_at(url: str) -> Check:
    """Return the check of the page on which the episode ends."""
    return _check("url_match", url=url)


def shows(pages: Sequence[tuple[str, str, str, Sequence[str]]]) -> Check:
    """Return the check of what elements of pages say at the end.

    Args:
        pages: address, the element's HTML id, and its text or, where there are any, parts of it.
    """
    return _check(
        "program_html",
        pages=[
            {
                "url": url,
                "locator": f"document.querySelector('#{element}')?.outerText ?? ''",
                "required_contents": {"must_include": list(parts)}
                if parts
                else {"exact_match": exact},
            }
            for url, element, exact, parts in pages
        ],
    )


def _check(
    kind: str,
    answers: Mapping[str, object] | None = None,
    url: str = "",
    pages: Sequence[Mapping[str, object]] = (),
) -> Check:
    return {
        "eval_types": [kind],
        "reference_answers": answers,
        "reference_url": url,
        "url_note": "GOLD in PRED",
        "program_html": list(pages),
    }


def step_of(verb: str, name: str, text: str) -> Step:
    """Return a step of a way.

    Args:
        verb: link, button, radio (a click on one of that name); fill (a field), enter (the same,
            sending its form), seek (a search field); stop, with the answer as its name.

    Raises:
        ValueError: another verb.
    """
    if verb == "stop":
        return {"do": "stop", "answer": name}
    if verb in ("link", "button", "radio"):
        return {"do": "click", "role": verb, "name": name}
    if verb not in ("fill", "enter", "seek"):
        raise ValueError(f"no step begins with {verb!r}")
    role = "searchbox" if verb == "seek" else "textbox"
    return {"do": "type", "role": role, "name": name, "text": text, "enter": verb != "fill"}
