"""Designs of databases with their English words; the table is `domains.yaml`."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

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
