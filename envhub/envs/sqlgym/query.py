"""Execution of one untrusted SQL statement. It cannot change, leave or exhaust its database."""

import re
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envhub.envs.sqlgym.memory import MEMORY

MAX_COMPARISONS = 10**8  # Limit of one call, about 0.1 s.
TOO_BIG = "string or blob too big"  # sqlite's own message.
_REPEATED = re.compile(r"%[-+ #0,!]*(?:\d+|\*)?\.(\d+|\*)l{0,2}c")  # For example, %.5c gives ccccc.
_WHOLE = re.compile(r"\s*[+-]?\d+")


class BoundedFunctions:
    """Replaces the slow functions on one connection; their results stay the same.

    sqlite's printf and format repeat a character without a limit and check the size of the result
    only afterwards. Its trim, ltrim and rtrim compare each character of a text with each of a set.
    """

    def __init__(self, connection: sqlite3.Connection, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._plain: sqlite3.Connection | None = None  # Connection with the original functions.
        self.failure = ""  # Reason of a raised call; sqlite itself reports only a failure.
        for name in ("printf", "format"):
            connection.create_function(name, -1, self._printf, deterministic=True)
        strips = {"trim": str.strip, "ltrim": str.lstrip, "rtrim": str.rstrip}
        for name, strip in strips.items():
            connection.create_function(name, 2, self._trimmer(name, strip), deterministic=True)

    def close(self) -> None:
        """Close the additional connection."""
        if self._plain is not None:
            self._plain.close()
            self._plain = None

    def _printf(self, *values: Any) -> Any:
        """Return the result of sqlite's printf within the size limit."""
        if values and isinstance(values[0], str):
            self._check_format(values[0], values[1:])
        return self._call("printf", values)

    def _check_format(self, template: str, rest: tuple[Any, ...]) -> None:
        """Refuse a format whose result would exceed the size limit."""
        counts = _REPEATED.findall(template)
        num = sum(self._count(each) for each in counts if each != "*")
        if "*" in counts:
            num += max(map(self._count, rest), default=0)
        if num > self._max_bytes:
            raise self._refusal(TOO_BIG)

    def _count(self, value: Any) -> int:
        """Return sqlite's integer reading of a value, bounded by `max_bytes` + 1."""
        if isinstance(value, int | float):
            return int(min(abs(value), self._max_bytes + 1))
        text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
        match = _WHOLE.match(text)
        return min(abs(int(match[0][:20])), self._max_bytes + 1) if match else 0

    def _trimmer(self, name: str, strip: Any) -> Any:
        """Return a bounded version of one of sqlite's trim functions."""

        def trim(text: Any, characters: Any) -> Any:
            """Trim a text, or refuse a call with too many comparisons."""
            if isinstance(text, str) and isinstance(characters, str):
                return strip(text, characters)
            sizes = [len(x) if isinstance(x, str | bytes) else 1 for x in (text, characters)]
            if sizes[0] * sizes[1] > MAX_COMPARISONS:
                raise self._refusal(TOO_BIG)
            return self._call(name, (text, characters))

        return trim

    def _call(self, name: str, values: tuple[Any, ...]) -> Any:
        """Return the result of sqlite's own function."""
        if self._plain is None:
            self._plain = sqlite3.connect(":memory:", check_same_thread=False)
            self._plain.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, self._max_bytes)
        marks = ", ".join("?" * len(values))
        try:
            return self._plain.execute(f"SELECT {name}({marks})", values).fetchone()[0]
        except sqlite3.Error as error:
            raise self._refusal(str(error)) from error

    def _refusal(self, reason: str) -> ValueError:
        """Return the error of a refused call, and keep its reason."""
        self.failure = reason
        return ValueError(reason)


# A statement may read, and may change its own connection: temporary tables and settings. Everything
# else (writes, ATTACH, transactions) is refused. A connection is used for one answer only.
ALLOWED = frozenset(
    {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
)
# These functions read or load files.
REFUSED_FUNCTIONS = frozenset({"load_extension", "fts3_tokenizer"})
MAKES_TEMPORARY = frozenset(
    {sqlite3.SQLITE_CREATE_TEMP_TABLE, sqlite3.SQLITE_CREATE_TEMP_INDEX}
    | {sqlite3.SQLITE_CREATE_TEMP_VIEW}
)
WRITES = frozenset({sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE})
# Settings of the whole process are read-only.
SHARED_PRAGMAS = frozenset(
    {"hard_heap_limit", "soft_heap_limit", "temp_store", "temp_store_directory"}
    | {"data_store_directory"}
)
# These pragmas do not check the time limit.
LONG_PRAGMAS = frozenset({"integrity_check", "quick_check"})
COMMENT = re.compile(r"--[^\n]*|/\*.*?(\*/|$)", re.DOTALL)
MAX_VALUE_BYTES = 200_000  # This also bounds the time of one call of a string function.
LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: MAX_VALUE_BYTES,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 20_000,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 200,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 50,
    sqlite3.SQLITE_LIMIT_VDBE_OP: 100_000,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1_000,
    sqlite3.SQLITE_LIMIT_COLUMN: 400,  # Together with MAX_VALUE_BYTES this bounds a row.
}
INSTRUCTIONS_PER_CHECK = 10_000
# Limit for all connections of the process. Temporary tables and sorting stay in memory, below it.
MAX_HEAP_BYTES = 512 << 20
MAX_RESULT_BYTES = 16 << 20  # Limit of the fetched rows, unless the gold answer has more.

NUMBER_BYTES = 8
NUM_FIRST_ROWS = 101  # The first rows, which can appear in an observation.

Row = tuple[int | float | str | bytes | None, ...]


class QueryRefused(ValueError):
    """The statement is wrong, forbidden, or too costly; the text gives the agent the reason."""


class NoTable(QueryRefused):
    """The statement ran and returned no table, like an empty statement."""


class LimitReached(QueryRefused):
    """The statement may be right, but exceeds its limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatementLimits:
    """The limits of one statement.

    `timeout_s` is processor time of the calling thread. `max_rows` and `max_bytes` (None: no limit)
    apply to the distinct rows.
    """

    timeout_s: float
    max_rows: int
    max_bytes: int | None = None


class Database(sqlite3.Connection):
    """A connection with bounded time for each function call."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        try:
            self.functions = BoundedFunctions(self, max_bytes=MAX_VALUE_BYTES)
        # sqlite3 gives no reason; out of memory is the only possible one.
        except sqlite3.OperationalError as error:
            raise MemoryError from error

    def close(self) -> None:
        self.functions.close()
        super().close()


def open_file(path: Path) -> Database:
    """Return a connection that reads a database file and never locks or changes it.

    Raises: sqlite3.Error, MemoryError: it cannot be read.
    """
    uri = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
    return MEMORY.used(lambda: _opened(uri, uri=True))


def open_image(content: bytes) -> Database:
    """Return a connection to an in-memory database, given the bytes of its file.

    Raises: MemoryError: it does not fit.
    """
    return MEMORY.used(lambda: _opened(":memory:", content))


def _opened(name: str, content: bytes | None = None, **named: Any) -> Database:
    """Return a connection with all limits set."""
    connection = Database(name, isolation_level=None, check_same_thread=False, **named)
    if content is not None:
        connection.deserialize(content)
    connection.execute("PRAGMA temp_store = MEMORY")
    connection.execute(f"PRAGMA hard_heap_limit = {MAX_HEAP_BYTES}")
    for limit, value in LIMITS.items():
        connection.setlimit(limit, value)
    connection.text_factory = lambda raw: raw.decode(errors="replace")
    connection.set_authorizer(_authorize)
    return connection


def _authorize(
    action: int, first: str | None, second: str | None, database: str | None, _by: str | None
) -> int:
    """Return sqlite's code for an allowed or a forbidden operation."""
    if action == sqlite3.SQLITE_PRAGMA:
        name = (first or "").lower()
        is_refused = name in LONG_PRAGMAS or (second is not None and name in SHARED_PRAGMAS)
        return sqlite3.SQLITE_DENY if is_refused else sqlite3.SQLITE_OK
    if database == "temp" and action in MAKES_TEMPORARY | WRITES:
        return sqlite3.SQLITE_OK
    # The look-up of a table function such as `pragma_table_info(...)` needs this.
    if first == "sqlite_master" and action in WRITES:
        return sqlite3.SQLITE_OK  # SQLite itself refuses a statement that writes there.
    if action not in ALLOWED:
        return sqlite3.SQLITE_DENY
    if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in REFUSED_FUNCTIONS:
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK


def size_of(rows: Iterable[Row]) -> int:
    """Return the approximate number of bytes in rows."""
    return sum(
        len(value) if isinstance(value, str | bytes) else NUMBER_BYTES
        for row in rows
        for value in row
    )


def rows_of(
    connection: Database, statement: str, limits: StatementLimits, *, is_last: bool = False
) -> list[Row]:
    """Return the rows of one statement; a statement that makes a temporary table returns [].

    With `is_last`, a successful statement closes the connection, which removes its temporary
    tables.

    Raises: QueryRefused: anything is wrong with the statement.
    """

    def run() -> list[Row]:
        rows = _rows_of(connection, statement, limits)
        if is_last:
            connection.close()
        return rows

    try:
        return MEMORY.used(run)
    except MemoryError as error:
        raise LimitReached("out of memory") from error


def _rows_of(connection: Database, statement: str, limits: StatementLimits) -> list[Row]:
    """Return the rows of one statement within its limits. Raises: QueryRefused."""
    deadline_s = time.thread_time() + limits.timeout_s
    too_late = f"the query took more than {limits.timeout_s:g} s"

    def is_late() -> bool:
        return time.thread_time() > deadline_s

    connection.functions.failure = ""
    connection.set_progress_handler(is_late, INSTRUCTIONS_PER_CHECK)
    try:
        rows = list(_fetch(connection, statement, limits))
    except NoTable:  # NoTable is a ValueError, which is handled below.
        raise
    except sqlite3.OperationalError as error:
        reason = connection.functions.failure or str(error)
        is_ended = is_late() and reason == "interrupted"
        if is_ended:
            raise LimitReached(too_late) from error
        raise QueryRefused(reason) from error
    # These include two statements (Warning before Python 3.12), NUL characters, and lone
    # surrogates.
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
        raise QueryRefused(str(error)) from error
    finally:
        connection.set_progress_handler(None, 0)
    if is_late():  # A single call or a sort is not interrupted at its time limit.
        raise LimitReached(too_late)
    return rows


def _fetch(connection: Database, statement: str, limits: StatementLimits) -> Iterator[Row]:
    """Yield the first `NUM_FIRST_ROWS` rows, and then each row that differs from earlier rows."""
    num_bytes = 0
    seen: set[Row] = set()
    with closing(connection.cursor()) as cursor:
        cursor.execute(statement)
        if cursor.description is None and not COMMENT.sub("", statement).strip(" \n\t;"):
            raise NoTable("the statement returns no table")
        for num_rows, row in enumerate(cursor, start=1):
            is_new = row not in seen
            if not is_new and num_rows > NUM_FIRST_ROWS:
                continue
            seen.add(row)
            num_bytes += size_of([row])
            if len(seen) > limits.max_rows:
                raise LimitReached(f"more than {limits.max_rows} rows")
            if limits.max_bytes is not None and num_bytes > limits.max_bytes:
                raise LimitReached(f"more than {limits.max_bytes} bytes")
            yield row
