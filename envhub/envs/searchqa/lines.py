"""Random access to the lines of a large text file without reading it into memory."""

import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from envhub.env import EnvFailure

CHUNK_BYTES = 1 << 20


class LineFile:
    """A file with thread-safe reads of lines by number; it closes when it is garbage-collected."""

    def __init__(self, path: Path, bounds: np.ndarray) -> None:
        """Open the file.

        `bounds` are byte positions, int64 [num_lines, 2]: the start and the end of each line.

        Raises: EnvFailure: the file cannot be opened.
        """
        self.path = path
        self._bounds = bounds
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise EnvFailure(f"{path} cannot be read: {error.strerror}") from error
        weakref.finalize(self, os.close, self._descriptor)

    def __len__(self) -> int:
        return len(self._bounds)

    def line(self, index: int) -> str:
        """Return one line.

        Raises: EnvFailure: the file changed since its lines were counted.
        """
        begin, end = (int(bound) for bound in self._bounds[index])
        try:
            content = os.pread(self._descriptor, end - begin, begin)
            text = content.decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise EnvFailure(f"{self.path}, line {index}: {error}") from error
        if len(content) < end - begin:
            raise EnvFailure(f"{self.path} has become shorter since it was opened")
        return text


def iterate_lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yield begin, end (bytes) and content of each non-blank line of a file."""
    position = 0
    with open(path, "rb", buffering=CHUNK_BYTES) as file:
        for content in file:
            if not content.isspace():
                yield position, position + len(content), content
            position += len(content)


def find_lines(path: Path) -> np.ndarray:
    """Return the bounds of the non-blank lines, int64 [num_lines, 2]."""
    bounds = [(begin, end) for begin, end, _ in iterate_lines(path)]
    return np.array(bounds, dtype=np.int64).reshape(-1, 2)


def count_lines(path: Path) -> int:
    """Return the number of non-blank lines."""
    with open(path, "rb", buffering=CHUNK_BYTES) as file:
        return sum(1 for content in file if not content.isspace())
