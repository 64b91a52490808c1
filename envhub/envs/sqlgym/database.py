"""The generated databases, with rows drawn from a seed."""

import random
import sqlite3
from dataclasses import dataclass
from functools import lru_cache

from envhub.envs.sqlgym.memory import MEMORY
from envhub.envs.sqlgym.schema import TEST_DOMAINS, Column, ColumnType, Domain, SqlTable
from envhub.tables import read_table

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
