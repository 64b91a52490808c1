"""Problems about the generated databases: questions, each with its gold statement."""

import random
import sqlite3
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache, partial
from itertools import count
from typing import Any

from envhub.env import ItemId, SubsetSpec
from envhub.envs.sqlgym.memory import MEMORY
from envhub.envs.sqlgym.problems import Problem, SchemaView, TableView
from envhub.envs.sqlgym.query import Database, StatementLimits, open_image, rows_of
from envhub.tables import read_table


class ColumnType(StrEnum):
    """The kinds of column, which determine the possible questions."""

    KEY = "key"
    NAME = "name"  # Identifies a row.
    CATEGORY = "category"  # One of a few words.
    NUMBER = "number"
    REFERENCE = "reference"  # The key of a row in another table.


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column: `name` in SQL, `label` in English.

    `words` are the values of a category. `low` and `high` bound a number, with `num_decimals`.
    `table` is the referenced table.
    """

    name: str
    label: str
    kind: ColumnType
    words: tuple[str, ...] = ()
    low: int = 0
    high: int = 0
    num_decimals: int = 0
    table: str = ""

    @property
    def sql_type(self) -> str:
        """The column's type in SQL."""
        if self.kind in (ColumnType.KEY, ColumnType.REFERENCE):
            return "INTEGER"
        if self.kind is ColumnType.NUMBER:
            return "REAL" if self.num_decimals else "INTEGER"
        return "TEXT"


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlTable:
    """A table; `one` and `many` are the English words for a row and for rows."""

    name: str
    one: str
    many: str
    num_rows: int
    columns: tuple[Column, ...]

    def of_kind(self, kind: ColumnType) -> tuple[Column, ...]:
        """Return the columns of a kind, in their order."""
        return tuple(column for column in self.columns if column.kind is kind)

    @property
    def a_row(self) -> str:
        """The English word for a row, with its article."""
        return f"an {self.one}" if self.one[0] in "aeiou" else f"a {self.one}"

    @property
    def title(self) -> Column:
        """The column that names a row."""
        return self.of_kind(ColumnType.NAME)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """A database's design: its tables, each after those that it references."""

    name: str
    tables: tuple[SqlTable, ...]

    def table(self, name: str) -> SqlTable:
        """Return a table by its name."""
        return next(table for table in self.tables if table.name == name)


def _table(name: str, row: Mapping[str, Any]) -> SqlTable:
    """Return a table of the design, with a key as first column."""
    columns = tuple(_column(each, facts) for each, facts in row["columns"].items())
    key = Column(name="id", label="id", kind=ColumnType.KEY)
    return SqlTable(
        name=name, one=row["row"], many=name, num_rows=row["num_rows"], columns=(key, *columns)
    )


def _column(name: str, facts: Mapping[str, Any]) -> Column:
    """Return a column of the design."""
    if "refers" in facts:
        label = name.replace("_", " ")
        return Column(name=name, label=label, kind=ColumnType.REFERENCE, table=facts["refers"])
    label = facts.get("label", name)
    if "words" in facts:
        return Column(name=name, label=label, kind=ColumnType.CATEGORY, words=tuple(facts["words"]))
    if "range" in facts:
        low, high = facts["range"]
        num_decimals = facts.get("decimals", 0)
        return Column(
            name=name,
            label=label,
            kind=ColumnType.NUMBER,
            low=low,
            high=high,
            num_decimals=num_decimals,
        )
    return Column(name=name, label=label, kind=ColumnType.NAME)


_DESIGNS = read_table(__file__, "domains.yaml")
TEST_DOMAINS = tuple(
    Domain(name=name, tables=tuple(_table(each, row) for each, row in tables.items()))
    for name, tables in _DESIGNS["domains"].items()
)
TRAIN_DOMAINS = tuple(domain for domain in TEST_DOMAINS if domain.name in _DESIGNS["train"])


NAMES = read_table(__file__, "names.yaml")


@dataclass(frozen=True, slots=True)
class DatabaseId:
    """Identifies a database: its design and the seed of its rows."""

    domain: str
    seed: str


def domain_of(database: DatabaseId) -> Domain:
    """Return a database's design."""
    return next(domain for domain in TEST_DOMAINS if domain.name == database.domain)


@lru_cache(maxsize=64)
def image(database: DatabaseId) -> bytes:
    """Return the sqlite file of a database, equal on all machines with the same sqlite version.

    Raises: MemoryError, EnvFailure: as `SharedMemory.used`.
    """
    return MEMORY.used(lambda: _make_image(database))


def _make_image(database: DatabaseId) -> bytes:
    """Return the sqlite file of a new database."""
    connection = sqlite3.connect(":memory:")
    rng = random.Random(f"{database.domain} {database.seed}")
    domain = domain_of(database)
    for table in domain.tables:
        connection.execute(_create(table))
        marks = ", ".join("?" for _ in table.columns)
        connection.executemany(
            f"INSERT INTO {table.name} VALUES ({marks})", _rows(table, rng, domain)
        )
    connection.commit()
    content = connection.serialize()
    connection.close()
    return content


def _create(table: SqlTable) -> str:
    """Return the statement that creates a table."""
    lines = []
    for column in table.columns:
        line = f"{column.name} {column.sql_type}"
        if column.kind is ColumnType.KEY:
            line += " PRIMARY KEY"
        if column.kind is ColumnType.REFERENCE:
            line += f" REFERENCES {column.table} (id)"
        lines.append(line)
    return f"CREATE TABLE {table.name} ({', '.join(lines)})"


def _rows(table: SqlTable, rng: random.Random, domain: Domain) -> list[tuple]:
    """Return the random rows of a table."""
    names = _names(table, rng)
    return [
        tuple(_value(column, i, names, rng, domain) for column in table.columns)
        for i in range(table.num_rows)
    ]


def _names(table: SqlTable, rng: random.Random) -> list[str]:
    """Return the names of a table's rows, all different."""
    if table.title.name not in ("name", "title"):
        return [f"{table.one[:1].upper()}{i + 101}" for i in range(table.num_rows)]
    kinds = ("first", "last") if table.name in NAMES["people"] else ("adjective", "noun")
    first, last = (NAMES[kind].split() for kind in kinds)
    return rng.sample([f"{a} {b}" for a in first for b in last], table.num_rows)


def _value(
    column: Column, row: int, names: list[str], rng: random.Random, domain: Domain
) -> int | float | str:
    """Return the value of a column in one row."""
    match column.kind:
        case ColumnType.KEY:
            return row + 1
        case ColumnType.NAME:
            return names[row]
        case ColumnType.CATEGORY:
            return rng.choice(column.words)
        case ColumnType.REFERENCE:
            # The square makes the distribution uneven: some rows have many references, others none.
            return 1 + int(domain.table(column.table).num_rows * rng.random() ** 2)
        case ColumnType.NUMBER:
            if column.num_decimals:
                return round(rng.uniform(column.low, column.high), column.num_decimals)
            return rng.randint(column.low, column.high)


NUM_DATABASES = 2  # Databases per design and split.
MAX_ANSWER_ROWS = 40
LIMITS = StatementLimits(timeout_s=5.0, max_rows=10_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlQuestion:
    """A question, its database, and its gold statement."""

    database: DatabaseId
    text: str
    gold: str


@dataclass(frozen=True, slots=True)
class Phrase:
    """A condition on a row ("whose ...") or a measure of a group, in English and in SQL."""

    words: str
    sql: str


class Draws:
    """The random draws of a template, by the names in its wordings.

    A template is an entry of `questions.yaml`. Its subject is `table`: any table; `grouped`: a
    table with categories; or `link`: a table `child` that refers to `parent`. Further draws follow
    in order, then the wordings of the question and of its gold statement.
    """

    def __init__(self, rng: random.Random, domain: Domain, template: Mapping[str, Any]) -> None:
        self._rng = rng
        self._domain = domain
        self._drawn: dict[str, Any] = {}
        getattr(self, f"_about_{template['about']}")()
        for name, (kind, *arguments) in template["draws"].items():
            self._drawn[name] = getattr(self, f"_{kind}")(*arguments)

    def fill(self, wording: str) -> str:
        """Return a wording with the drawn values filled in."""
        return wording.format(**self._drawn)

    def _about_table(self) -> None:
        """Draw a table."""
        self._drawn["table"] = self._rng.choice(self._domain.tables)

    def _about_grouped(self) -> None:
        """Draw a table that has a column of categories."""
        tables = [table for table in self._domain.tables if table.of_kind(ColumnType.CATEGORY)]
        self._drawn["table"] = self._rng.choice(tables)

    def _about_link(self) -> None:
        """Draw a table, its reference to another table, and that table."""
        links = [
            (table, column, self._domain.table(column.table))
            for table in self._domain.tables
            for column in table.of_kind(ColumnType.REFERENCE)
        ]
        child, reference, parent = self._rng.choice(links)
        self._drawn |= {"child": child, "reference": reference, "parent": parent}

    def _category(self, table: str) -> Column:
        """Draw a column of categories."""
        return self._rng.choice(self._drawn[table].of_kind(ColumnType.CATEGORY))

    def _choice(self, *options: Any) -> Any:
        """Draw one of some options."""
        return self._rng.choice(options)

    def _between(self, low: int, high: int) -> int:
        """Draw a whole number between two bounds."""
        return self._rng.randint(low, high)

    def _number(self, table: str) -> Column:
        """Draw a column of numbers."""
        return self._rng.choice(self._drawn[table].of_kind(ColumnType.NUMBER))

    def _measure(self, name: str) -> Phrase:
        """Draw a measure of a group: its number of rows, or an average."""
        table: SqlTable = self._drawn[name]
        if self._rng.random() < 0.5:
            return Phrase(f"the number of {table.many}", "COUNT(*)")
        column = self._number(name)
        return Phrase(f"the average {column.label} of the {table.many}", f"AVG({column.name})")

    def _condition(self, table: str, prefix: str = "", beside: str = "") -> Phrase:
        """Draw a condition on a row. It never uses the column of the question."""
        asked = self._drawn.get(beside)
        drawn: SqlTable = self._drawn[table]
        categories = [c for c in drawn.of_kind(ColumnType.CATEGORY) if c is not asked]
        numbers = [c for c in drawn.of_kind(ColumnType.NUMBER) if c is not asked]
        if categories and (not numbers or self._rng.random() < 0.6):
            column = self._rng.choice(categories)
            word = self._rng.choice(column.words)
            return Phrase(f"whose {column.label} is {word}", f"{prefix}{column.name} = '{word}'")
        column = self._rng.choice(numbers)
        share = self._rng.uniform(0.2, 0.8)
        bound = column.low + round((column.high - column.low) * share)
        word, sign = ("above", ">") if self._rng.random() < 0.5 else ("below", "<")
        return Phrase(
            f"whose {column.label} is {word} {bound}", f"{prefix}{column.name} {sign} {bound}"
        )


TEMPLATES: dict[str, dict[str, Any]] = read_table(__file__, "questions.yaml")
SIZES = {"train": 200, "test": 100}  # Number of questions of each difficulty.


@lru_cache(maxsize=8)
def questions(difficulty: str, split: str) -> tuple[SqlQuestion, ...]:
    """Return the questions of a difficulty; all are distinct, and each has an answer.

    No test question occurs in a training item, even of another database.
    """
    rng = random.Random(f"questions {difficulty} {split}")
    domains = TRAIN_DOMAINS if split == "train" else TEST_DOMAINS
    taken = {q.text for q in questions(difficulty, "train")} if split == "test" else set()
    templates = list(TEMPLATES[difficulty].values())
    made: dict[str, SqlQuestion] = {}
    connections: dict[DatabaseId, Database] = {}
    # Designs and templates alternate, so that all of them are used equally often.
    for turn in count():
        if len(made) == SIZES[split]:
            break
        domain = domains[turn % len(domains)]
        template = templates[turn // len(domains) % len(templates)]
        chosen = DatabaseId(domain.name, f"{split} {rng.randrange(NUM_DATABASES)}")
        draws = Draws(rng, domain, template)
        text = draws.fill(template["text"])
        gold = draws.fill(template["gold"])
        if chosen not in connections:
            connections[chosen] = open_image(image(chosen))
        is_new = text not in made and text not in taken
        if is_new and _is_answerable(connections[chosen], gold):
            made[text] = SqlQuestion(database=chosen, text=text, gold=gold)
    for connection in connections.values():
        connection.close()
    return tuple(made.values())


def _is_answerable(connection: Database, gold: str) -> bool:
    """Return False if the question has no answer, or too many answers."""
    rows = rows_of(connection, gold, LIMITS)
    return 0 < len(rows) <= MAX_ANSWER_ROWS and rows[0][0] is not None


_MAKING = threading.Lock()  # The first sessions must not all create the same data.
SUBSETS = {
    difficulty: SubsetSpec(num_train=SIZES["train"], num_test=SIZES["test"], max_turns=1)
    for difficulty in TEMPLATES
}


@lru_cache(maxsize=64)
def view_of(domain: Domain) -> SchemaView:
    """Return the agent's view of a design."""
    tables = tuple(
        TableView(
            name=table.name,
            columns=tuple((c.name, c.sql_type.lower(), c.label) for c in table.columns),
            key=("id",),
        )
        for table in domain.tables
    )
    references = tuple(
        (table.name, column.name, column.table, "id")
        for table in domain.tables
        for column in table.of_kind(ColumnType.REFERENCE)
    )
    return SchemaView(name=domain.name, tables=tables, references=references)


def problem_of(item: ItemId) -> Problem:
    """Return the problem of an item of SUBSETS, created on first use."""
    with _MAKING:
        question = questions(item.subset, item.split)[item.index]
        content = image(question.database)
    return Problem(
        schema=view_of(domain_of(question.database)),
        question=question.text,
        evidence="",
        gold=question.gold,
        open=partial(open_image, content),
    )
