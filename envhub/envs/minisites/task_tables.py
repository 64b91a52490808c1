"""Task templates as tables: their loops, random draws and wordings.

A template is an entry of a site's `tasks.yaml`. Its `for` is a list of steps. Steps bind names. A
looping step runs the following steps once per round:
    rows: SELECT        loops over rows, whose columns become names; `some: N`: over N random rows
    pairs: SELECT       loops over `number` random pairs of rows, bound as first_... and second_...
    sample: {x: words}  loops over `number` random entries of a list of words
    loop: {x: words}    loops over a named or a literal list of words
    times: N            loops N times
    pick: SELECT        binds a random row
    draw: {x: words}    binds a random entry of a list; an entry that is a mapping binds its keys
    number: {x: [a, b]} binds a random number from a to below b
    find: SELECT        binds the first row
    list: {x: SELECT}   binds the first column of all rows
    let: {x: wording}   binds a wording
    when: EXPRESSION    continues only if the SQL expression is true
Wordings and SELECTs refer to bound names as {x}. A SELECT also takes values as :x and the table's
`queries` as {query}. Lists of words come from the table's `words` and from the site's data. If a
template has `variants`, their tasks follow each other.
"""

import sqlite3
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any
from urllib.parse import quote_plus

from envhub.envs.minisites.site import money
from envhub.tables import read_table

Names = Mapping[str, Any]
Step = dict[str, str | bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDraft:
    """One task of a template in one world.

    `check` is WebArena's `eval` part. `path` has the expert's steps from the site's first page,
    including the final `stop`.
    """

    intent: str
    check: dict[str, Any]
    path: tuple[Step, ...]


class Wording(str):
    """Text of a table; its {names} are filled in when it is used."""


class JoinedAnswers(tuple[str, ...]):
    """Several answers; in a text they are joined by commas."""

    def __format__(self, spec: str) -> str:
        return ", ".join(self)


FORMATS: dict[str, Callable[[Any], str]] = {
    "money": money,
    "units": lambda cents: f"{cents / 100:.2f}",
    "lower": str.lower,
    "query": quote_plus,
    "km": lambda meters: f"{meters / 1000:.2f} km",
}


class Filler(string.Formatter):
    """Fills wordings. Values that are wordings are filled recursively, and FORMATS adds formats."""

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Names) -> Any:
        """Return the value of a name."""
        value = super().get_value(key, args, kwargs)
        return self.vformat(value, (), kwargs) if isinstance(value, Wording) else value

    def format_field(self, value: Any, format_spec: str) -> str:
        """Return a value in a format."""
        known = FORMATS.get(format_spec)
        return known(value) if known else super().format_field(value, format_spec)


FILLER = Filler()


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateTable:
    """The templates of one site; `functions` are the Python functions for its SELECTs."""

    host: str
    site: str
    database: str
    templates: Mapping[str, Mapping[str, Any]]
    words: Mapping[str, Any]
    queries: Mapping[str, str]
    ways: Mapping[str, Sequence[str]]
    functions: Mapping[str, Callable[..., Any]]

    def drafts(self, name: str, db: sqlite3.Connection, random: Random) -> list[TaskDraft]:
        """Return a template's tasks in one world, in the order of its rounds."""
        for function, python in self.functions.items():
            db.create_function(function, -1, python)
        names = {"host": self.host, **{key: f"({sql})" for key, sql in self.queries.items()}}
        rounds = _Rounds(db, random, self.words)
        template = self.templates[name]
        return [
            self._draft(variant, bound)
            for variant in template.get("variants", [template])
            for bound in rounds.of(variant["for"], names)
        ]

    def _draft(self, template: Mapping[str, Any], names: Names) -> TaskDraft:
        """Return the task of one round."""
        path = [each for step in template["path"] for each in self._steps(step, names)]
        return TaskDraft(
            intent=_fill(template["intent"], names), check=_check(template, names), path=tuple(path)
        )

    def _steps(self, step: str, names: Names) -> list[Step]:
        """Return one step, or the steps of a named way, `@way`."""
        if step.startswith("@"):
            return [each for way in self.ways[step[1:]] for each in self._steps(way, names)]
        verb, _, rest = step.partition(" ")
        name, _, text = rest.partition(" = ")
        return [_step(verb, _fill(name, names), _fill(text, names))]


def _fill(wording: str, names: Names) -> str:
    """Return a wording with the names filled in."""
    return FILLER.vformat(wording, (), names)


def _fill_all(wordings: Sequence[str], names: Names) -> list[str]:
    """Return wordings with the names filled in."""
    return [_fill(wording, names) for wording in wordings]


def _check(template: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """Return the check of the answer, of the final address, or of the final pages."""
    kind = "string_match"
    answers = None
    url = ""
    pages = []
    if "says" in template:
        answers = {"exact_match": _fill(template["says"], names)}
    elif "says_all" in template:
        wanted = template["says_all"]  # Wordings, or the name of a list.
        listed = names[wanted] if isinstance(wanted, str) else _fill_all(wanted, names)
        answers = {"must_include": list(listed)}
    elif "ends_at" in template:
        kind = "url_match"
        url = _fill(template["ends_at"], names)
    else:
        kind = "program_html"
        pages = [_shown(page, names) for page in template["shows"]]
    return {
        "eval_types": [kind],
        "reference_answers": answers,
        "reference_url": url,
        "url_note": "GOLD in PRED",
        "program_html": pages,
    }


def _shown(page: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """Return the check of an element's whole text or, with `has`, of parts of it."""
    element = _fill(page["element"], names)
    parts = _fill_all(page.get("has", ()), names)
    exact = _fill(page.get("is", ""), names)
    return {
        "url": _fill(page["page"], names),
        "locator": f"document.querySelector('#{element}')?.outerText ?? ''",
        "required_contents": {"must_include": parts} if parts else {"exact_match": exact},
    }


def _step(verb: str, name: str, text: str) -> Step:
    """Return a step of a path.

    Args:
        verb: link, button, radio (click on one with that name); fill (a field), enter (the same,
            then send its form), seek (a search field); stop, with the answer as its name.
    """
    if verb == "stop":
        return {"do": "stop", "answer": name}
    if verb in ("link", "button", "radio"):
        return {"do": "click", "role": verb, "name": name}
    if verb not in ("fill", "enter", "seek"):
        raise ValueError(f"no step begins with {verb!r}")
    role = "searchbox" if verb == "seek" else "textbox"
    return {"do": "type", "role": role, "name": name, "text": text, "enter": verb != "fill"}


class _Rounds:
    """Runs the steps of a template's `for`; each round binds names."""

    def __init__(self, db: sqlite3.Connection, random: Random, words: Mapping[str, Any]) -> None:
        self._db = db
        self._random = random
        self._words = words

    def of(self, steps: Sequence[Mapping[str, Any]], names: Names) -> Iterator[Names]:
        """Yield the bound names of each round."""
        if not steps:
            yield names
            return
        first, *rest = steps
        kind = next(iter(first))
        for bound in getattr(self, f"_{kind}")(first[kind], names, first):
            yield from self.of(rest, {**names, **bound})

    def _select(self, sql: str, names: Names) -> list[sqlite3.Row]:
        """Return the rows of a query with the names filled in."""
        values = {key: _plain(value, names) for key, value in names.items()}
        text = _fill(sql, names)
        if text.startswith("("):  # A query of the table; the text may append further clauses.
            text = f"SELECT * FROM {text}"
        return self._db.execute(text, values).fetchall()

    def _entries(self, where: Any, names: Names) -> list[Any]:
        """Return the entries of a list, or of a list in the words by its dotted key."""
        if not isinstance(where, str):
            return where
        found = self._words
        for key in _fill(where, names).split("."):
            found = found[key]
        return list(found)

    def _rows(self, sql: str, names: Names, step: Names) -> list[Names]:
        """Return a round for each row of a query, or for some of them."""
        rows = self._select(sql, names)
        if "some" in step:
            rows = self._random.sample(rows, min(step["some"], len(rows)))
        return [dict(row) for row in rows]

    def _pairs(self, sql: str, names: Names, step: Names) -> list[Names]:
        """Return a round for each of several random pairs of rows."""
        rows = self._select(sql, names)
        drawn = [self._random.sample(rows, 2) for _ in range(step["number"])]
        return [
            _prefixed("first_", first) | _prefixed("second_", second) for first, second in drawn
        ]

    def _sample(self, wanted: Names, names: Names, step: Names) -> list[Names]:
        """Return a round for each of several random entries."""
        ((name, where),) = wanted.items()
        drawn = self._random.sample(self._entries(where, names), step["number"])
        return [_bound(name, entry) for entry in drawn]

    def _loop(self, wanted: Names, names: Names, step: Names) -> list[Names]:
        """Return a round for each entry."""
        ((name, where),) = wanted.items()
        return [_bound(name, entry) for entry in self._entries(where, names)]

    def _times(self, number: int, names: Names, step: Names) -> list[Names]:
        """Return a number of rounds that bind no name."""
        return [{}] * number

    def _pick(self, sql: str, names: Names, step: Names) -> list[Names]:
        """Return one round with a random row."""
        return [dict(self._random.choice(self._select(sql, names)))]

    def _draw(self, wanted: Names, names: Names, step: Names) -> list[Names]:
        """Return one round with a random entry for each name."""
        bound: dict[str, Any] = {}
        for name, where in wanted.items():
            bound |= _bound(name, self._random.choice(self._entries(where, names)))
        return [bound]

    def _number(self, wanted: Names, names: Names, step: Names) -> list[Names]:
        """Return one round with a random number for each name."""
        return [{name: self._random.randrange(*bounds) for name, bounds in wanted.items()}]

    def _find(self, sql: str, names: Names, step: Names) -> list[Names]:
        """Return one round with the first row; none without rows."""
        return [dict(row) for row in self._select(sql, names)[:1]]

    def _list(self, wanted: Names, names: Names, step: Names) -> list[Names]:
        """Return one round with the rows of each query as a list of answers."""
        found = {name: self._select(sql, names) for name, sql in wanted.items()}
        return [{name: JoinedAnswers(row[0] for row in rows) for name, rows in found.items()}]

    def _let(self, wanted: Names, names: Names, step: Names) -> list[Names]:
        """Return one round with the wordings by their names."""
        return [{name: Wording(wording) for name, wording in wanted.items()}]

    def _when(self, expression: str, names: Names, step: Names) -> list[Names]:
        """Return one round if the expression is true, else none."""
        ((is_true,),) = self._select(f"SELECT {expression}", names)
        return [{}] if is_true else []


def _prefixed(prefix: str, row: sqlite3.Row) -> dict[str, Any]:
    """Return a row with a prefix before each column's name."""
    return {prefix + key: value for key, value in dict(row).items()}


def _bound(name: str, entry: Any) -> Names:
    """Return an entry as names: its own keys, or one name for a plain value."""
    found = entry if isinstance(entry, Mapping) else {name: entry}
    return {key: Wording(each) if isinstance(each, str) else each for key, each in found.items()}


def _plain(value: Any, names: Names) -> Any:
    """Return a value as plain text, with the names filled in."""
    if isinstance(value, Wording):
        return _fill(value, names) if "{" in value else str(value)
    return str(value) if isinstance(value, JoinedAnswers) else value


def read_tasks(
    path: str,
    words: Mapping[str, Any],
    *,
    functions: Mapping[str, Callable[..., Any]] | None = None,
) -> TemplateTable:
    """Return the templates of a site.

    Args:
        path: path of the table, relative to this file.
        words: further lists for its steps.
        functions: Python functions for its SELECTs.
    """
    table = read_table(__file__, path)
    return TemplateTable(
        **{**table, "words": {**words, **table.get("words", {})}}, functions=functions or {}
    )
