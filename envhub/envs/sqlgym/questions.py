"""Questions about the generated databases, each with the statement that answers it."""

import random
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import count

from envhub.envs.sqlgym import database
from envhub.envs.sqlgym.database import DatabaseId
from envhub.envs.sqlgym.domains import TEST_DOMAINS, TRAIN_DOMAINS
from envhub.envs.sqlgym.query import Limits, open_image, rows_of
from envhub.envs.sqlgym.schema import Column, Domain, Kind, Table

NUM_DATABASES = 2  # per design and split
MAX_ANSWER_ROWS = 40
LIMITS = Limits(timeout_s=5.0, max_rows=10_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question, the database it is about, and its gold statement."""

    database: DatabaseId
    text: str
    gold: str


@dataclass(frozen=True, slots=True)
class Asked:
    """A question in the making."""

    text: str
    gold: str


@dataclass(frozen=True, slots=True)
class Scope:
    """What a template draws from."""

    rng: random.Random
    domain: Domain

    def table(self) -> Table:
        """Returns any table."""
        return self.rng.choice(self.domain.tables)

    def link(self) -> tuple[Table, Column, Table]:
        """Returns a table, its reference, and the table referred to."""
        links = [
            (table, column, self.domain.table(column.table))
            for table in self.domain.tables
            for column in table.of_kind(Kind.REFERENCE)
        ]
        return self.rng.choice(links)

    def number(self, table: Table) -> Column:
        """Returns a column of numbers."""
        return self.rng.choice(table.of_kind(Kind.NUMBER))

    def condition(
        self, table: Table, alias: str = "", *, beside: Column | None = None
    ) -> tuple[str, str]:
        """Returns a condition on a row in English ("whose ...") and in SQL.

        Args:
            beside: the column that the question is about, which the condition leaves alone.
        """
        prefix = f"{alias}." if alias else ""
        categories = [c for c in table.of_kind(Kind.CATEGORY) if c is not beside]
        numbers = [c for c in table.of_kind(Kind.NUMBER) if c is not beside]
        if categories and (not numbers or self.rng.random() < 0.6):
            column = self.rng.choice(categories)
            word = self.rng.choice(column.words)
            return f"whose {column.label} is {word}", f"{prefix}{column.name} = '{word}'"
        column = self.rng.choice(numbers)
        bound = self._bound(column)
        if self.rng.random() < 0.5:
            return f"whose {column.label} is above {bound}", f"{prefix}{column.name} > {bound}"
        return f"whose {column.label} is below {bound}", f"{prefix}{column.name} < {bound}"

    def _bound(self, column: Column) -> int:
        width = column.high - column.low
        return column.low + round(width * self.rng.uniform(0.2, 0.8))


def _a(table: Table) -> str:
    return f"an {table.one}" if table.one[0] in "aeiou" else f"a {table.one}"


def _count(scope: Scope) -> Asked:
    table = scope.table()
    words, sql = scope.condition(table)
    return Asked(
        f"How many {table.many} are there {words}?",
        f"SELECT COUNT(*) FROM {table.name} WHERE {sql}",
    )


def _list(scope: Scope) -> Asked:
    table = scope.table()
    words, sql = scope.condition(table)
    name = table.title
    return Asked(
        f"Give the {name.label} of every {table.one} {words}.",
        f"SELECT {name.name} FROM {table.name} WHERE {sql}",
    )


def _aggregate(scope: Scope) -> Asked:
    table = scope.table()
    column = scope.number(table)
    words, sql = scope.condition(table, beside=column)
    english, function = scope.rng.choice(
        [("average", "AVG"), ("highest", "MAX"), ("lowest", "MIN"), ("sum of the", "SUM")]
    )
    return Asked(
        f"What is the {english} {column.label} of the {table.many} {words}?",
        f"SELECT {function}({column.name}) FROM {table.name} WHERE {sql}",
    )


def _both(scope: Scope) -> Asked:
    table = scope.table()
    (words, sql), (more_words, more_sql) = scope.condition(table), scope.condition(table)
    name = table.title
    return Asked(
        f"Give the {name.label} of every {table.one} {words} and {more_words}.",
        f"SELECT {name.name} FROM {table.name} WHERE {sql} AND {more_sql}",
    )


def _extreme(scope: Scope) -> Asked:
    table = scope.table()
    column, name = scope.number(table), table.title
    words, sql = scope.condition(table, beside=column)
    english, function = scope.rng.choice([("highest", "MAX"), ("lowest", "MIN")])
    return Asked(
        f"Among the {table.many} {words}, which have the {english} {column.label}? "
        f"Give the {name.label} of each.",
        f"SELECT {name.name} FROM {table.name} WHERE {sql} AND {column.name} = "
        f"(SELECT {function}({column.name}) FROM {table.name} WHERE {sql})",
    )


def _per_category(scope: Scope) -> Asked:
    table = scope.rng.choice([t for t in scope.domain.tables if t.of_kind(Kind.CATEGORY)])
    group = scope.rng.choice(table.of_kind(Kind.CATEGORY))
    words, sql = scope.condition(table, beside=group)
    if scope.rng.random() < 0.5:
        what, value = f"the number of {table.many}", "COUNT(*)"
    else:
        column = scope.number(table)
        what, value = f"the average {column.label} of the {table.many}", f"AVG({column.name})"
    return Asked(
        f"For each {group.label}, give the {group.label} and {what} {words}.",
        f"SELECT {group.name}, {value} FROM {table.name} WHERE {sql} GROUP BY {group.name}",
    )


def _join_list(scope: Scope) -> Asked:
    child, column, parent = scope.link()
    words, sql = scope.condition(parent, "p")
    more_words, more_sql = scope.condition(child, "c")
    return Asked(
        f"Give the {child.title.label} of every {child.one} {more_words} that belongs to "
        f"{_a(parent)} {words}.",
        f"SELECT c.{child.title.name} FROM {child.name} AS c JOIN {parent.name} AS p "
        f"ON c.{column.name} = p.id WHERE {more_sql} AND {sql}",
    )


def _join_aggregate(scope: Scope) -> Asked:
    child, column, parent = scope.link()
    words, sql = scope.condition(parent, "p")
    number = scope.number(child)
    return Asked(
        f"What is the average {number.label} of the {child.many} that belong to "
        f"{_a(parent)} {words}?",
        f"SELECT AVG(c.{number.name}) FROM {child.name} AS c JOIN {parent.name} AS p "
        f"ON c.{column.name} = p.id WHERE {sql}",
    )


def _having(scope: Scope) -> Asked:
    child, column, parent = scope.link()
    words, sql = scope.condition(child, "c")
    least = scope.rng.randint(2, 8)
    return Asked(
        f"Which {parent.many} have at least {least} {child.many} {words}? Give the "
        f"{parent.title.label} of each {parent.one} and that number of {child.many}.",
        f"SELECT p.{parent.title.name}, COUNT(*) FROM {parent.name} AS p JOIN {child.name} AS c "
        f"ON c.{column.name} = p.id WHERE {sql} GROUP BY p.id HAVING COUNT(*) >= {least}",
    )


def _without(scope: Scope) -> Asked:
    child, column, parent = scope.link()
    words, sql = scope.condition(child, "c")
    more_words, more_sql = scope.condition(parent, "p")
    return Asked(
        f"Give the {parent.title.label} of every {parent.one} {more_words} and that has no "
        f"{child.one} {words}.",
        f"SELECT p.{parent.title.name} FROM {parent.name} AS p WHERE {more_sql} AND NOT EXISTS "
        f"(SELECT 1 FROM {child.name} AS c WHERE c.{column.name} = p.id AND {sql})",
    )


def _above_average(scope: Scope) -> Asked:
    child, column, parent = scope.link()
    words, sql = scope.condition(parent, "p")
    number = scope.number(child)
    return Asked(
        f"Give the {child.title.label} of every {child.one} that belongs to {_a(parent)} {words} "
        f"and whose {number.label} is above the average {number.label} of all {child.many} of "
        f"that {parent.one}.",
        f"SELECT c.{child.title.name} FROM {child.name} AS c JOIN {parent.name} AS p "
        f"ON c.{column.name} = p.id WHERE {sql} AND c.{number.name} > "
        f"(SELECT AVG(o.{number.name}) FROM {child.name} AS o WHERE o.{column.name} = p.id)",
    )


def _most(scope: Scope) -> Asked:
    child, column, parent = scope.link()
    words, sql = scope.condition(child, "c")
    counts = (
        f"SELECT c.{column.name} AS of_id, COUNT(*) AS num FROM {child.name} AS c "
        f"WHERE {sql} GROUP BY c.{column.name}"
    )
    return Asked(
        f"Which {parent.many} have the most {child.many} {words}? Give the "
        f"{parent.title.label} of each.",
        f"WITH counts AS ({counts}) SELECT p.{parent.title.name} FROM {parent.name} AS p "
        f"JOIN counts ON counts.of_id = p.id WHERE counts.num = (SELECT MAX(num) FROM counts)",
    )


TEMPLATES: dict[str, tuple[Callable[[Scope], Asked], ...]] = {
    "easy": (_count, _list, _aggregate, _both),
    "medium": (_extreme, _per_category, _join_list, _join_aggregate),
    "hard": (_having, _without, _above_average, _most),
}
SIZES = {"train": 200, "test": 100}  # questions of each difficulty


@lru_cache(maxsize=8)
def questions(difficulty: str, split: str) -> tuple[Question, ...]:
    """Returns the questions of a difficulty; no two are alike, and each has an answer.

    A test question is asked in no training item, of whatever database.
    """
    rng = random.Random(f"questions {difficulty} {split}")
    domains = TRAIN_DOMAINS if split == "train" else TEST_DOMAINS
    taken = {q.text for q in questions(difficulty, "train")} if split == "test" else set()
    templates = TEMPLATES[difficulty]
    made: dict[str, Question] = {}
    connections: dict[DatabaseId, sqlite3.Connection] = {}
    # In turn, so that every design and template is asked about equally often.
    for turn in count():
        if len(made) == SIZES[split]:
            break
        domain = domains[turn % len(domains)]
        template = templates[turn // len(domains) % len(templates)]
        chosen = DatabaseId(domain.name, f"{split} {rng.randrange(NUM_DATABASES)}")
        asked = template(Scope(rng, domain))
        if chosen not in connections:
            connections[chosen] = open_image(database.image(chosen))
        is_new = asked.text not in made and asked.text not in taken
        if is_new and _is_answerable(connections[chosen], asked):
            made[asked.text] = Question(database=chosen, text=asked.text, gold=asked.gold)
    for connection in connections.values():
        connection.close()
    return tuple(made.values())


def _is_answerable(connection: sqlite3.Connection, asked: Asked) -> bool:
    """Returns False when nothing, or too much, answers the question."""
    rows = rows_of(connection, asked.gold, LIMITS)
    return 0 < len(rows) <= MAX_ANSWER_ROWS and rows[0][0] is not None
