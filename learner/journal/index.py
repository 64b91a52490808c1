"""The index of a journal that is still being written: one row for each episode, in columns.

Damaged records are reported and skipped. Columns of numbers and name codes make 100,000 rows fast
to filter and to count.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import ConfigError, WireError
from common.ids import subset_of
from common.wire.messages import EpisodeKind, Trajectory
from learner.journal.journal import (
    PACKED_SUFFIX,
    JournalFile,
    journal_files,
    load_pruned,
    open_journal_file,
)

MAX_PROBLEMS = 50  # Maximum number of stored messages. Further problems are only counted.
IN_FLIGHT = "in_flight"
EVALUATED = "evaluated"
FAILED = "failed"
INTS: tuple[str, ...] = (
    "segment",
    "offset",
    "member",
    "attempt",
    "horizon",
    "stage",
    "version",
    "first_version",
    "last_version",
    "turns",
    "invalid",
    "tokens",
    "sampled",
    "success",
    "trained_at",
)
FLOATS: tuple[str, ...] = ("reward", "wall_s", "generate_s", "env_s", "logprob")
NAMES = ("env", "subset", "item", "group", "kind", "policy", "actor", "end", "outcome", "cause")
FIRST_CAPACITY = 1024


@dataclass(slots=True)
class ValueDictionary:
    """The distinct values of one column, with their codes."""

    texts: list[str] = field(default_factory=list[str])
    codes: dict[str, int] = field(default_factory=dict[str, int])

    def code(self, text: str) -> int:
        """Return the code of a text. A new text gets a new code."""
        code = self.codes.setdefault(text, len(self.texts))
        if code == len(self.texts):
            self.texts.append(text)
        return code


class EpisodeRows:
    """Rows that one thread appends while others read. Readers get complete rows only.

    Example: add({...}) -> row 0; column("reward") -> array of all rewards so far.
    """

    def __init__(self) -> None:
        self.num = 0
        self.ids: list[str] = []
        self.row_of: dict[str, int] = {}  # The newest row of each episode.
        self.names = {name: ValueDictionary() for name in NAMES}
        self._columns: dict[str, np.ndarray] = {
            **{name: np.zeros(FIRST_CAPACITY, np.int64) for name in INTS},
            **{name: np.zeros(FIRST_CAPACITY, np.float64) for name in FLOATS},
            **{name: np.zeros(FIRST_CAPACITY, np.int32) for name in NAMES},
        }

    def add(self, episode_id: str, values: Mapping[str, Any]) -> int:
        """Append a row with a value for every column; return its number."""
        row = self.num
        if row == len(self._columns["reward"]):
            self._columns = {n: np.concatenate([c, c]) for n, c in self._columns.items()}
        for name, column in self._columns.items():
            value = values[name]
            column[row] = self.names[name].code(value) if name in self.names else value
        self.ids.append(episode_id)
        self.num = row + 1  # `num` must grow before `row_of` refers to the row.
        self.row_of[episode_id] = row
        return row

    def settle(self, row: int, *, outcome: str, cause: str, trained_at: int) -> None:
        """Set the outcome of an episode."""
        self._columns["outcome"][row] = self.names["outcome"].code(outcome)
        self._columns["cause"][row] = self.names["cause"].code(cause)
        self._columns["trained_at"][row] = trained_at

    @property
    def column_names(self) -> list[str]:
        """The names of all columns."""
        return [*self._columns]

    def restore(
        self, ids: list[str], columns: Mapping[str, np.ndarray], names: Mapping[str, list[str]]
    ) -> None:
        """Load complete columns. Raises: ValueError: their lengths differ."""
        num = len(ids)
        if any(columns[name].shape != (num,) for name in self._columns):
            raise ValueError(f"a column does not have {num} rows")
        room = max(FIRST_CAPACITY, num + num // 2)
        for name, column in self._columns.items():
            self._columns[name] = np.zeros(room, column.dtype)
            self._columns[name][:num] = columns[name]
        for name, values in self.names.items():
            values.texts, values.codes = names[name], {t: i for i, t in enumerate(names[name])}
        self.ids, self.row_of, self.num = ids, {each: i for i, each in enumerate(ids)}, num

    def column(self, name: str) -> np.ndarray:
        """Return a column over all rows; name columns hold codes."""
        return self._columns[name][: self.num]

    def get(self, row: int) -> dict[str, Any]:
        """Return a row as a dict, with names in place of codes."""
        values: dict[str, Any] = {"id": self.ids[row]}
        for name, column in self._columns.items():
            value = column[row].item()
            values[name] = self.names[name].texts[value] if name in self.names else value
        return values


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
