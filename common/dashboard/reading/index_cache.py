"""What is known of a journal, kept in the user's cache folder, so that it is read only once.

A file per run, named by the run's path. It holds for the journal whose segments are those that
were read; one that was replaced, packed or pruned meanwhile is read anew.
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

from common.dashboard.reading.rows import EpisodeRows
from common.errors import WireError
from common.store import cache
from common.store.segments import list_segments, open_segment

logger = logging.getLogger(__name__)

FORMAT = 1
MAX_BYTES = 1 << 30  # of all files; the oldest go
MIN_ROWS = 2000  # below it a journal is read about as fast
GROWTH = 1.2  # of the rows since it was written


def cache_folder() -> Path:
    """Return the user's folder for it."""
    return cache.cache_folder() / "dashboard"


class IndexCache:
    """The file of one run.

    Example: load(rows) -> None the first time; later what `save` was given, rows filled.
    """

    def __init__(self, folder: Path, journal: Path) -> None:
        """Name the file; nothing is read or written yet."""
        name = hashlib.sha256(os.fsencode(journal.absolute())).hexdigest()[:24]
        self._path, self._journal = folder / f"{name}.npz", journal
        self._num_saved = 0

    def load(self, rows: EpisodeRows) -> dict[str, Any] | None:
        """Fill the rows, and return what was kept beside them; None if nothing fits the journal."""
        try:
            # Opened here: numpy leaves a file open that is damaged.
            with self._path.open("rb") as handle, np.load(handle, allow_pickle=False) as kept:
                told = json.loads(kept["told"].tobytes())
                if told["format"] != FORMAT or not self._is_still(told):
                    return None
                columns = {name: kept[f"column.{name}"] for name in rows.column_names}
                ids: list[str] = json.loads(kept["ids"].tobytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, BadZipFile) as error:
            logger.info("reading the journal anew: %s: %r", self._path, error)
            return None
        rows.restore(ids, columns, told["names"])
        self._num_saved = rows.num
        return told["beside"]

    def save(self, rows: EpisodeRows, beside: Mapping[str, Any], *, reached: int) -> None:
        """Keep the rows if they have become many more; that it cannot be is no error.

        Args:
            beside: JSON that `load` returns.
            reached: the segment up to which the journal was read.
        """
        if rows.num < max(MIN_ROWS, GROWTH * self._num_saved):
            return
        self._num_saved = rows.num
        told = {"format": FORMAT, "segments": self._segments(reached), "reached": reached}
        end = [int(rows.column(name)[-1]) for name in ("segment", "offset")]
        names = {name: each.texts for name, each in rows.names.items()}
        told |= {"last": rows.ids[-1], "end": end, "beside": dict(beside), "names": names}
        texts = {"told": told, "ids": rows.ids}
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
            logger.info("not kept for the next time: %s", error)
            partial.unlink(missing_ok=True)

    def _segments(self, reached: int) -> dict[str, list[int]]:
        """Return what tells the segments before the one that is being read from others."""
        return {
            path.name: [(found := path.stat()).st_size, found.st_mtime_ns]
            for number, path in list_segments(self._journal).items()
            if number < reached
        }

    def _is_still(self, told: dict[str, Any]) -> bool:
        """Whether the journal is the one that was read: also the last record is the same."""
        if told["segments"] != self._segments(told["reached"]):
            return False
        number, offset = told["end"]
        try:
            segment = open_segment(self._journal, number)
            if segment is None:
                return False
            with segment:
                record = segment.record_at(offset)
                message = segment.message(record, offset) if record else None
        except WireError:
            return False
        return message is not None and message.episode_id == told["last"]

    def _make_room(self) -> None:
        kept = [(path.stat(), path) for path in self._path.parent.glob("*.npz")]
        total = sum(found.st_size for found, _ in kept)
        for found, path in sorted(kept, key=lambda each: each[0].st_mtime):
            if total > MAX_BYTES and path != self._path:
                path.unlink(missing_ok=True)
                total -= found.st_size
