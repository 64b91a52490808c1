"""The index of a journal that is still being written: one row for each episode, kept in a cache.

Damaged records are reported and skipped. The cache is a folder of the user with one file for each
run, named by a hash of the journal's path. A cache file is valid while the journal has the same
segments. If a segment was replaced, packed or pruned, the journal is read again.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from actor.engine import startup_history
from common.errors import ConfigError, WireError
from common.ids import subset_of
from common.wire.messages import EpisodeKind, Trajectory
from learner.journal.files import (
    PACKED_SUFFIX,
    JournalFile,
    journal_files,
    load_pruned,
    open_journal_file,
)
from tools.dashboard.reading.rows import EpisodeRows

logger = logging.getLogger(__name__)

MAX_PROBLEMS = 50  # Maximum number of stored messages. Further problems are only counted.
IN_FLIGHT = "in_flight"
EVALUATED = "evaluated"
FAILED = "failed"
FORMAT = 1
MAX_BYTES = 1 << 30  # Maximum size of all cache files. The oldest files are deleted first.
MIN_ROWS = 2000  # Minimum number of rows. A smaller journal is read as fast without a cache.
GROWTH = 1.2  # Growth of the number of rows that makes a new cache file worthwhile.


class EpisodeIndex:
    """Indexes each complete record of a journal once, over any number of refreshes.

    Example: refresh(budget_s=0.2) -> True while records are left, then False. After the writer
    appends, the next refresh continues at the same offset.
    """

    def __init__(self, folder: Path) -> None:
        self.rows = EpisodeRows()
        self.problems: list[str] = []
        self.num_problems = 0
        self._folder = folder
        self._number = -1  # Number of the current segment.
        self._offset = 0
        self._size = 0
        self._is_done = True
        self._segment: JournalFile | None = None
        self._checked_bytes = -1  # Size of a segment at which its end was found torn or damaged.
        self._done_bytes = 0

    def refresh(self, *, budget_s: float) -> bool:
        """Read for at most `budget_s` seconds; return whether records are left."""
        until = time.monotonic() + budget_s
        try:
            # A packed segment is read without a break: seeking in it means unpacking it again.
            while time.monotonic() < until or self._is_packed():
                if not self._step():
                    return False
            return True
        finally:
            self._close()

    def _is_packed(self) -> bool:
        return self._segment is not None and self._segment.path.suffix == PACKED_SUFFIX

    def kept(self) -> dict[str, int] | None:
        """Return the JSON state for `restore`; None if there were problems.

        A new index then reads the journal again and reports the problems.
        """
        if self.num_problems:
            return None
        names = ("_number", "_offset", "_size", "_is_done", "_done_bytes")
        return {name: int(getattr(self, name)) for name in names}

    def restore(self, saved: dict[str, int]) -> None:
        """Continue at the position of an earlier index, whose rows are already loaded."""
        self._number = saved["_number"]
        self._offset = saved["_offset"]
        self._size = saved["_size"]
        self._is_done = bool(saved["_is_done"])
        self._done_bytes = saved["_done_bytes"]

    def progress(self) -> float:
        """Return the indexed share of the journal's bytes."""
        paths = journal_files(self._folder)
        total = sum(path.stat().st_size for n, path in paths.items() if n > self._number)
        whole = self._done_bytes + max(self._size, self._offset) + total
        return 1.0 if whole <= 0 else (self._done_bytes + self._offset) / whole

    def open(self, row: int) -> Trajectory:
        """Return a complete trajectory. Raises: WireError: it is damaged, or was pruned."""
        number = int(self.rows.column("segment")[row])
        offset = int(self.rows.column("offset")[row])
        segment = open_journal_file(self._folder, number)
        if segment is None:
            raise WireError(f"{self._folder}: segment {number} was pruned")
        with segment:
            record = segment.record_at(offset)
            if record is None:
                raise WireError(f"{segment.path}: no complete record at offset {offset}")
            return segment.message(record, offset)

    def _close(self) -> None:
        if self._segment is not None:
            self._segment.__exit__()
            self._segment = None

    def _step(self) -> bool:
        """Read up to 64 records; return whether there may be more."""
        if self._segment is None and not self._open():
            return False
        assert self._segment is not None
        self._size = self._segment.size
        for _ in range(64):
            if not self._record(self._segment):
                break
        else:
            return True
        is_last = not any(number > self._number for number in journal_files(self._folder))
        # The writer may have filled the segment since the last record was read.
        if self._record(self._segment):
            return True
        if is_last:
            return False
        if self._offset < self._segment.size:
            self._add_problem(
                f"{self._segment.path}: no complete record from offset {self._offset} on"
            )
        self._close()
        self._end_segment()
        return True

    def _end_segment(self) -> None:
        """Count the bytes of a segment that is read to its end."""
        self._done_bytes += max(self._size, self._offset)
        self._is_done = True

    def _open(self) -> bool:
        """Open the current or the next segment; return whether one exists."""
        if not self._is_done:
            try:
                self._segment = open_journal_file(self._folder, self._number)
            except WireError as error:
                self._add_problem(str(error))
            if self._segment is not None:
                return True
            self._end_segment()  # The segment was pruned or damaged since the last refresh.
        return self._next_segment()

    def _next_segment(self) -> bool:
        """Continue with the next segment of the journal; return whether there is one."""
        numbers = list(journal_files(self._folder))
        following = [number for number in numbers if number > self._number]
        if not following:
            return False
        if self._number < 0:
            try:
                pruned = load_pruned(self._folder)
            except ConfigError as error:
                self._add_problem(str(error))
            else:
                if pruned.before:
                    self._add_problem(pruned.text(self._folder))
        elif following[0] != self._number + 1:
            self._add_problem(f"{self._folder}: segment {self._number + 1} is missing")
        self._number = following[0]
        self._offset = 0
        self._checked_bytes = -1
        self._size = 0
        self._is_done = False
        return self._open()

    def _record(self, segment: JournalFile) -> bool:
        """Index one record, or skip a damaged part; return whether the position advanced."""
        size = segment.size
        if size == self._checked_bytes or self._offset >= size:
            return False
        try:
            record = segment.record_at(self._offset)
            if record is None:
                self._checked_bytes = size
                return False
            self._add(segment.message(record, self._offset))
            self._offset = record.end
        except WireError as error:
            self._add_problem(str(error))
            following = segment.next_whole(self._offset)
            if following is None:
                self._checked_bytes = size
                return False
            self._offset = following
        return True

    def _add(self, trajectory: Trajectory) -> None:
        """Add a trajectory as a row."""
        place = {"segment": self._number, "offset": self._offset}
        self.rows.add(trajectory.episode_id, values_of(trajectory) | place)

    def _add_problem(self, problem: str) -> None:
        """Keep a problem for display, up to a limit."""
        self.num_problems += 1
        if len(self.problems) < MAX_PROBLEMS and problem not in self.problems:
            self.problems.append(problem)


def values_of(trajectory: Trajectory) -> dict[str, Any]:
    """Return a trajectory's columns without its place.

    The training outcomes are filled in later from the logs.
    """
    t = trajectory
    versions = t.versions[t.loss_mask]
    is_failed = t.end_reason.is_infrastructure_failure
    outcome = IN_FLIGHT
    if t.kind is EpisodeKind.EVAL:
        outcome = FAILED if is_failed else EVALUATED
    return {
        **{"member": t.member, "attempt": t.attempt, "horizon": t.horizon},
        **{"stage": t.horizon_stage, "version": t.opened_at_version},
        "first_version": int(versions.min()) if versions.size else t.opened_at_version,
        "last_version": int(versions.max()) if versions.size else t.opened_at_version,
        **{"turns": t.num_turns, "invalid": t.num_invalid_actions, "tokens": len(t.token_ids)},
        **{"sampled": int(versions.size), "success": int(t.is_success), "trained_at": -1},
        **{"reward": t.reward, "wall_s": t.wall_s, "generate_s": t.generate_s, "env_s": t.env_s},
        "logprob": float(np.mean(t.logprobs[t.loss_mask])) if versions.size else 0.0,
        **{"env": t.env, "subset": subset_of(t.item_id), "item": t.item_id, "group": t.group_id},
        **{"kind": t.kind.value, "policy": t.policy.value, "actor": t.actor},
        **{"end": t.end_reason.value, "outcome": outcome},
        "cause": t.error if is_failed else "",
    }


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
