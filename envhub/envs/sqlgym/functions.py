"""Bounded versions of SQL functions. sqlite checks its time limit only between function calls."""

import re
import sqlite3
from typing import Any

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

    def _printf(self, *given: Any) -> Any:
        """Return the result of sqlite's printf within the size limit."""
        if given and isinstance(given[0], str):
            self._check_format(given[0], given[1:])
        return self._call("printf", given)

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
        found = _WHOLE.match(text)
        return min(abs(int(found[0][:20])), self._max_bytes + 1) if found else 0

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

    def _call(self, name: str, given: tuple[Any, ...]) -> Any:
        """Return the result of sqlite's own function."""
        if self._plain is None:
            self._plain = sqlite3.connect(":memory:", check_same_thread=False)
            self._plain.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, self._max_bytes)
        marks = ", ".join("?" * len(given))
        try:
            return self._plain.execute(f"SELECT {name}({marks})", given).fetchone()[0]
        except sqlite3.Error as error:
            raise self._refusal(str(error)) from error

    def _refusal(self, reason: str) -> ValueError:
        """Return the error of a refused call, and keep its reason."""
        self.failure = reason
        return ValueError(reason)
