"""Shared tools for filling the sites' databases: words, tables and rows."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

from envhub.tables import read_table, read_text

TODAY = "2024-01-15"
WORDS: dict[str, Any] = read_table(__file__, "words.yaml")


@contextmanager
def filling(db: sqlite3.Connection, code: str, name: str, seed: int) -> Iterator[Random]:
    """Create the tables of the module's `schema.sql`; yield the random generator for their rows."""
    db.executescript("BEGIN;" + read_text(code, "schema.sql"))
    yield Random(f"{name}-{seed}")
    db.execute("COMMIT")


def insert(db: sqlite3.Connection, table: str, **values: object) -> int:
    """Add a row and return its id."""
    marks = ", ".join("?" * len(values))
    sql = f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks})"
    return db.execute(sql, tuple(values.values())).lastrowid or 0


def day_of(random: Random, year: int) -> str:
    """Return a random day of a year."""
    return f"{year}-{random.randrange(1, 13):02d}-{random.randrange(1, 29):02d}"


def slug_of(name: str) -> str:
    """Return a name in the form used in addresses."""
    return "-".join(name.lower().replace("&", "and").split())
