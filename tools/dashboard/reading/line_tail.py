"""Reads growing JSON-lines files, each line once. Invalid lines are counted and skipped."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LAST_BYTES = 4096


class LineTail:
    """New lines of a file since the last read. A truncated or replaced file is read again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem = ""  # Error of the first line that could not be read.
        self.num_bad = 0
        self._offset = 0
        self._num_lines = 0
        self._inode = -1

    def place(self) -> list[Any]:
        """Return the read position as JSON, with a digest of the bytes before it."""
        return [self._offset, self._num_lines, self._inode, self._before(self._offset)]

    def go_to(self, place: list[Any]) -> bool:
        """Continue at a position of `place`; return False if the bytes before it differ."""
        offset, num_lines, inode, before = place
        if self._before(offset) != before:
            return False
        self._offset = offset
        self._num_lines = num_lines
        self._inode = inode
        return True

    def _before(self, offset: int) -> str:
        """Return a digest of the last bytes before an offset, "" without a file."""
        try:
            with self.path.open("rb") as handle:
                handle.seek(max(0, offset - LAST_BYTES))
                return hashlib.sha256(handle.read(min(offset, LAST_BYTES))).hexdigest()
        except OSError:
            return ""

    def is_new(self) -> bool:
        """Reset all state if the file was replaced or is shorter; return whether it was."""
        try:
            found = self.path.stat()
        except OSError:
            return False
        was_read = self._inode != -1
        is_other = was_read and (found.st_ino != self._inode or found.st_size < self._offset)
        if is_other:
            self._offset = 0
            self._num_lines = 0
            self.problem = ""
            self.num_bad = 0
        self._inode = found.st_ino
        return is_other

    def lines(self) -> Iterator[Any]:
        """Yield the values of new complete lines. An incomplete last line is read later."""
        try:
            handle = self.path.open("rb")
        except OSError:
            return
        with handle:
            handle.seek(self._offset)
            for line in handle:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                self._num_lines += 1
                try:
                    found: Any = json.loads(line)
                except ValueError as error:
                    self.bad(error)
                    continue
                yield found

    def bad(self, error: Exception) -> None:
        """Count an invalid line, and keep the error of the first one."""
        self.num_bad += 1
        where = f"{self.path}: line {self._num_lines} is damaged"
        self.problem = self.problem or f"{where} ({error.__class__.__name__}: {error!s:.80})"
