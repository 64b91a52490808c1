"""Runs one untrusted SQL statement on a database that it cannot change, leave or exhaust."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

# Only reading is allowed. Everything else (writes, ATTACH, PRAGMA, transactions) is refused.
ALLOWED = frozenset(
    {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
)
# They read or load files, or answer differently each time.
REFUSED_FUNCTIONS = frozenset({"load_extension", "fts3_tokenizer", "random", "randomblob"})
MAX_VALUE_BYTES = 200_000  # also bounds what one call of a string function can take
LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: MAX_VALUE_BYTES,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 20_000,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 200,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 50,
    sqlite3.SQLITE_LIMIT_VDBE_OP: 100_000,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1_000,
}
INSTRUCTIONS_PER_CHECK = 10_000
# For all connections of the process: temporary tables and sorting stay in memory, below this.
MAX_HEAP_BYTES = 512 << 20

Row = tuple[int | float | str | bytes | None, ...]


class QueryRefused(ValueError):
    """The statement is wrong, forbidden, or too costly; the text tells the agent why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`timeout_s` is processor time of the calling thread; `max_rows` is what is fetched."""

    timeout_s: float
    max_rows: int


def open_file(path: Path) -> sqlite3.Connection:
    """Return a connection that reads a database file and never locks or changes it."""
    uri = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
    return _secured(sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False))


def open_image(content: bytes) -> sqlite3.Connection:
    """Return a connection to a database in memory, given as the bytes of its file."""
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    connection.deserialize(content)
    return _secured(connection)


def _secured(connection: sqlite3.Connection) -> sqlite3.Connection:
    connection.execute("PRAGMA query_only = 1")
    connection.execute("PRAGMA temp_store = MEMORY")
    connection.execute(f"PRAGMA hard_heap_limit = {MAX_HEAP_BYTES}")
    for limit, value in LIMITS.items():
        connection.setlimit(limit, value)
    connection.text_factory = lambda raw: raw.decode(errors="replace")
    connection.set_authorizer(_authorize)
    return connection


def _authorize(
    action: int, first: str | None, second: str | None, _database: str | None, _by: str | None
) -> int:
    if action not in ALLOWED:
        return sqlite3.SQLITE_DENY
    if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in REFUSED_FUNCTIONS:
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK


def rows_of(connection: sqlite3.Connection, statement: str, limits: Limits) -> list[Row]:
    """Return the rows of one SELECT statement.

    Raises: QueryRefused: anything is wrong with the statement.
    """
    deadline_s = time.thread_time() + limits.timeout_s

    def is_late() -> bool:
        return time.thread_time() > deadline_s

    connection.set_progress_handler(is_late, INSTRUCTIONS_PER_CHECK)
    try:
        rows = list(_fetch(connection, statement, limits.max_rows))
    except sqlite3.OperationalError as error:
        if is_late() and str(error) == "interrupted":
            raise QueryRefused(f"the query took more than {limits.timeout_s:g} s") from error
        raise QueryRefused(str(error)) from error
    # Also two statements (Warning before Python 3.12), NUL characters, and lone surrogates.
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
        raise QueryRefused(str(error)) from error
    except MemoryError as error:
        raise QueryRefused("out of memory") from error
    finally:
        connection.set_progress_handler(None, 0)
    return rows


def _fetch(connection: sqlite3.Connection, statement: str, max_rows: int) -> Iterator[Row]:
    with closing(connection.cursor()) as cursor:
        cursor.execute(statement)
        if cursor.description is None:
            raise QueryRefused("the statement returns no table")
        for num_rows, row in enumerate(cursor, start=1):
            if num_rows > max_rows:
                raise QueryRefused(f"more than {max_rows} rows")
            yield row
