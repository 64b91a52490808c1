"""Drafts of tasks: what a template gets, and the checks and steps that it returns.

A template is a generator function that yields the drafts of one world.
"""

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

from envhub.envs.minisites.store import master

Step = dict[str, str | bool]
Check = dict[str, Any]


class TaskDraft(NamedTuple):
    """One task of a template in one world.

    `check` is WebArena's `eval` part. `path` has the expert's steps from the site's first page,
    including the final `stop`.
    """

    intent: str
    check: Check
    path: Sequence[Step]


class TaskWorld:
    """The rows of one seeded database, and the random draws of one template in it.

    A query takes its `:name` values from the attributes of `given` rows and from `values`.
    """

    def __init__(self, db: sqlite3.Connection, random: Random) -> None:
        self._db = db
        self.random = random

    def rows(self, sql: str, *sources: SimpleNamespace, **values: object) -> list[Any]:
        """Return all rows of a query; the columns are their attributes."""
        for row in sources:
            values = {**vars(row), **values}
        return [SimpleNamespace(**dict(row)) for row in self._db.execute(sql, values)]

    def some(self, num: int, sql: str, *sources: SimpleNamespace, **values: object) -> list[Any]:
        """Return at most `num` random rows of a query."""
        rows = self.rows(sql, *sources, **values)
        return self.random.sample(rows, min(num, len(rows)))

    def pairs(self, num: int, sql: str, **values: object) -> list[tuple[Any, Any]]:
        """Return `num` random pairs of different rows."""
        rows = self.rows(sql, **values)
        drawn = [self.random.sample(rows, 2) for _ in range(num)]
        return [(first, second) for first, second in drawn]

    def pick(self, sql: str, *sources: SimpleNamespace, **values: object) -> Any:
        """Return a random row of a query."""
        return self.random.choice(self.rows(sql, *sources, **values))

    def first(self, sql: str, *sources: SimpleNamespace, **values: object) -> Any:
        """Return the first row of a query."""
        return self.rows(sql, *sources, **values)[0]

    def only(self, sql: str, *sources: SimpleNamespace, **values: object) -> list[Any]:
        """Return the row of a query; [] if it has none or several."""
        rows = self.rows(sql, *sources, **values)
        return rows if len(rows) == 1 else []

    def column(self, sql: str, *sources: SimpleNamespace, **values: object) -> list[Any]:
        """Return the first column of all rows."""
        return [next(iter(vars(row).values())) for row in self.rows(sql, *sources, **values)]

    def value(self, sql: str, *sources: SimpleNamespace, **values: object) -> Any:
        """Return the first column of the first row."""
        return self.column(sql, *sources, **values)[0]


Template = Callable[[TaskWorld], Iterator[TaskDraft]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteTemplates:
    """The templates of one site, by name."""

    host: str
    site: str  # WebArena's name of the site.
    database: str
    templates: dict[str, Template] = field(default_factory=dict[str, Template])

    def template(self, function: Template) -> Template:
        """Register a template under the name of its function."""
        self.templates[function.__name__] = function
        return function

    def drafts(self, name: str, seed: int, random: Random) -> list[TaskDraft]:
        """Return a template's tasks in the world of a seed."""
        return list(self.templates[name](TaskWorld(master(self.database, seed), random)))


def _check(kind: str, *, answers: Check | None = None, url: str = "", pages: Any = ()) -> Check:
    """Return WebArena's `eval` part of a task."""
    return {
        "eval_types": [kind],
        "reference_answers": answers,
        "reference_url": url,
        "url_note": "GOLD in PRED",
        "program_html": list(pages),
    }


def says(answer: object) -> Check:
    """Return the check that the answer is this text."""
    return _check("string_match", answers={"exact_match": str(answer)})


def says_all(*parts: object) -> Check:
    """Return the check that the answer includes these texts."""
    return _check("string_match", answers={"must_include": list(map(str, parts))})


def ends_at(url: str) -> Check:
    """Return the check of the final address."""
    return _check("url_match", url=url)


def reads(page: str, element: str, text: object) -> Check:
    """Return the check that an element of a page has this text."""
    return _check("program_html", pages=[_shown(page, element, {"exact_match": str(text)})])


def holds(page: str, element: str, *parts: str) -> Check:
    """Return the check that an element of a page includes these texts."""
    return _check("program_html", pages=[_shown(page, element, {"must_include": list(parts)})])


def _shown(page: str, element: str, contents: Check) -> Check:
    """Return the check of one element."""
    locator = f"document.querySelector('#{element}')?.outerText ?? ''"
    return {"url": page, "locator": locator, "required_contents": contents}


def shows(*checks: Check) -> Check:
    """Return several checks of pages as one."""
    return _check(
        "program_html", pages=[page for check in checks for page in check["program_html"]]
    )


def link(name: str) -> Step:
    """Return the step that clicks a link."""
    return {"do": "click", "role": "link", "name": name}


def button(name: str) -> Step:
    """Return the step that clicks a button."""
    return {"do": "click", "role": "button", "name": name}


def radio(name: str) -> Step:
    """Return the step that clicks a radio button."""
    return {"do": "click", "role": "radio", "name": name}


def fill(name: str, text: object) -> Step:
    """Return the step that fills a field."""
    return {"do": "type", "role": "textbox", "name": name, "text": str(text), "enter": False}


def enter(name: str, text: str) -> Step:
    """Return the step that fills a field and sends its form."""
    return fill(name, text) | {"enter": True}


def seek(name: str, text: str) -> Step:
    """Return the step that fills a search field and sends it."""
    return enter(name, text) | {"role": "searchbox"}


def stop(answer: object = "") -> Step:
    """Return the step that ends the episode."""
    return {"do": "stop", "answer": str(answer)}
