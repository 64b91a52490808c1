"""Reads JSON-line files that grow, each line once; what is no JSON is counted and skipped."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

LAST_BYTES = 4096


def as_map(found: object) -> dict[str, Any]:
    """Return a JSON object as it is; {} for anything else."""
    return cast(dict[str, Any], found) if isinstance(found, dict) else {}


def json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object that a file holds; {} if it is not there or holds none."""
    try:
        return as_map(json.loads(path.read_bytes()))
    except (OSError, ValueError):
        return {}


class LineTail:
    """A file's new lines since the last look. A file that was cut or replaced is read anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem = ""  # the first line that could not be read
        self.num_bad = 0
        self._offset = 0
        self._num_lines = 0
        self._inode = -1

    def place(self) -> list[Any]:
        """Return how far it was read, as JSON, and what lies there."""
        return [self._offset, self._num_lines, self._inode, self._before(self._offset)]

    def go_to(self, place: list[Any]) -> bool:
        """Go on where another one was; return False if what lies there is something else."""
        offset, num_lines, inode, before = place
        if self._before(offset) != before:
            return False
        self._offset, self._num_lines, self._inode = offset, num_lines, inode
        return True

    def _before(self, offset: int) -> str:
        """Return a digest of the last bytes before an offset; "" where there is no file."""
        try:
            with self.path.open("rb") as handle:
                handle.seek(max(0, offset - LAST_BYTES))
                return hashlib.sha256(handle.read(min(offset, LAST_BYTES))).hexdigest()
        except OSError:
            return ""

    def is_new(self) -> bool:
        """Forget everything if the file is another one now, or shorter; return whether it is."""
        try:
            found = self.path.stat()
        except OSError:
            return False
        was_read = self._inode != -1
        is_other = was_read and (found.st_ino != self._inode or found.st_size < self._offset)
        if is_other:
            self._offset, self._num_lines, self.problem, self.num_bad = 0, 0, "", 0
        self._inode = found.st_ino
        return is_other

    def lines(self) -> Iterator[Any]:
        """Yield what new whole lines hold; what a writer is in the middle of waits."""
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
        """Count a line that is not what it should be."""
        self.num_bad += 1
        where = f"{self.path}: line {self._num_lines} is damaged"
        self.problem = self.problem or f"{where} ({error.__class__.__name__}: {error!s:.80})"
