"""The cache of journal indexes: a folder of the user with one file for each run.

A file is named by a hash of the journal's path. It is valid while the journal has the same
segments. If a segment was replaced, packed or pruned, the journal is read again.
"""

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from actor.engine import startup_history
from common.errors import WireError
from learner.journal.index import EpisodeRows
from learner.journal.journal import journal_files, open_journal_file

logger = logging.getLogger(__name__)

FORMAT = 1
MAX_BYTES = 1 << 30  # Maximum size of all cache files. The oldest files are deleted first.
MIN_ROWS = 2000  # Minimum number of rows. A smaller journal is read as fast without a cache.
GROWTH = 1.2  # Growth of the number of rows that makes a new cache file worthwhile.


def cache_folder() -> Path:
    """Return the folder of the cache files."""
    return startup_history.cache_folder() / "dashboard"


class IndexCache:
    """The cache file of one run.

    Example: load(rows) -> None at first; after `save` it fills the rows and returns `beside`.
    """

    def __init__(self, folder: Path, journal: Path) -> None:
        """Compute the path of the file. No I/O happens here."""
        name = hashlib.sha256(os.fsencode(journal.absolute())).hexdigest()[:24]
        self._path = folder / f"{name}.npz"
        self._journal = journal
        self._num_saved = 0

    def load(self, rows: EpisodeRows) -> dict[str, Any] | None:
        """Fill the rows and return the saved `beside`; None if no valid cache file exists."""
        try:
            # `np.load` would leave a damaged file open.
            with self._path.open("rb") as handle, np.load(handle, allow_pickle=False) as arrays:
                header = json.loads(arrays["told"].tobytes())
                if header["format"] != FORMAT or not self._is_still(header):
                    return None
                columns = {name: arrays[f"column.{name}"] for name in rows.column_names}
                ids: list[str] = json.loads(arrays["ids"].tobytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, BadZipFile) as error:
            logger.info("cached journal index not readable path=%s error=%r", self._path, error)
            return None
        rows.restore(ids, columns, header["names"])
        self._num_saved = rows.num
        return header["beside"]

    def save(self, rows: EpisodeRows, beside: Mapping[str, Any], *, reached: int) -> None:
        """Save the rows if their number has grown enough. A failed write is only logged.

        Args:
            beside: JSON that `load` returns.
            reached: number of the segment up to which the journal was read.
        """
        if rows.num < max(MIN_ROWS, GROWTH * self._num_saved):
            return
        self._num_saved = rows.num
        header = {"format": FORMAT, "segments": self._segments(reached), "reached": reached}
        end = [int(rows.column(name)[-1]) for name in ("segment", "offset")]
        names = {name: each.texts for name, each in rows.names.items()}
        header |= {"last": rows.ids[-1], "end": end, "beside": dict(beside), "names": names}
        texts = {"told": header, "ids": rows.ids}
        arrays = {f"column.{name}": rows.column(name) for name in rows.column_names}
        arrays |= {n: np.frombuffer(json.dumps(t).encode(), np.uint8) for n, t in texts.items()}
        partial = self._path.with_suffix(f".{os.getpid()}.partial")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as handle:
                np.savez(handle, allow_pickle=False, **arrays)
            partial.replace(self._path)
            self._make_room()
        except OSError as error:
            logger.info("journal index not cached error=%s", error)
            partial.unlink(missing_ok=True)

    def _segments(self, reached: int) -> dict[str, list[int]]:
        """Return size and mtime of each finished segment: those numbered below `reached`."""
        return {
            path.name: [(stat := path.stat()).st_size, stat.st_mtime_ns]
            for number, path in journal_files(self._journal).items()
            if number < reached
        }

    def _is_still(self, header: dict[str, Any]) -> bool:
        """Whether the journal is unchanged: the same segments and the same last record."""
        if header["segments"] != self._segments(header["reached"]):
            return False
        number, offset = header["end"]
        try:
            segment = open_journal_file(self._journal, number)
            if segment is None:
                return False
            with segment:
                record = segment.record_at(offset)
                message = segment.message(record, offset) if record else None
        except WireError:
            return False
        return message is not None and message.episode_id == header["last"]

    def _make_room(self) -> None:
        """Remove the oldest cache files over the size limit."""
        files = [(path.stat(), path) for path in self._path.parent.glob("*.npz")]
        total = sum(stat.st_size for stat, _ in files)
        for stat, path in sorted(files, key=lambda each: each[0].st_mtime):
            if total > MAX_BYTES and path != self._path:
                path.unlink(missing_ok=True)
                total -= stat.st_size
