"""Growing JSON-lines files of a run, each line read once: its metrics and its outcomes."""

import hashlib
import json
import math
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from common.store.run_dir import RunDir, as_map
from learner.journal.index import EpisodeRows

LAST_BYTES = 4096
MAX_POINTS = 1000  # Maximum number of points of a series. Longer series are averaged in bins.
Settled = tuple[str, str, int]  # (outcome, cause, version of the training step or -1)
MAX_ABSENT = 1000  # Maximum number of listed episodes that never arrived.


class LineTail:
    """New lines of a file. Invalid ones are counted; a truncated or replaced file is read again."""

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
            stat = self.path.stat()
        except OSError:
            return False
        was_read = self._inode != -1
        is_other = was_read and (stat.st_ino != self._inode or stat.st_size < self._offset)
        if is_other:
            self._offset = 0
            self._num_lines = 0
            self.problem = ""
            self.num_bad = 0
        self._inode = stat.st_ino
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
                    value: Any = json.loads(line)
                except ValueError as error:
                    self.bad(error)
                    continue
                yield value

    def bad(self, error: Exception) -> None:
        """Count an invalid line, and keep the error of the first one."""
        self.num_bad += 1
        where = f"{self.path}: line {self._num_lines} is damaged"
        self.problem = self.problem or f"{where} ({error.__class__.__name__}: {error!s:.80})"


class MetricColumns:
    """Every metric of every step; nan where a step lacks the metric."""

    def __init__(self, path: Path) -> None:
        self._tail = LineTail(path)
        self.num = 0
        self.columns: dict[str, array[float]] = {}

    def refresh(self) -> bool:
        """Read the new lines; return whether there were any, or the file was replaced."""
        is_other = self._tail.is_new()
        if is_other:  # A restart truncates the steps that it repeats.
            self.num = 0
            self.columns = {}
        before = self.num
        for record in self._tail.lines():
            line = as_map(record)
            if not isinstance(line.get("step"), int | float):
                self._tail.bad(ValueError("not a JSON object with a step"))
                continue
            self._add(line)
        return is_other or self.num > before

    def _add(self, line: dict[str, Any]) -> None:
        """Add a step. `num` grows last, so that concurrent readers get complete steps only."""
        numbers = {name: value for name, value in line.items() if isinstance(value, int | float)}
        if new := numbers.keys() - self.columns.keys():
            unknown = array("d", [math.nan]) * self.num
            self.columns = self.columns | {name: unknown[:] for name in numbers if name in new}
        for name, column in self.columns.items():
            column.append(numbers.get(name, math.nan))
        self.num += 1

    @property
    def problem(self) -> str:
        """The problem of the file; "" if there is none."""
        return self._tail.problem

    def last(self, name: str) -> float | None:
        """Return the newest value of a metric; None if there is none."""
        column = self.columns.get(name, ())
        return next((v for v in reversed(column) if not math.isnan(v)), None)

    def tail(self, num_steps: int) -> list[dict[str, float | None]]:
        """Return the newest steps as dicts, like the lines of the file."""
        first = max(0, self.num - num_steps)
        return [
            {n: c[i] for n, c in self.columns.items() if not math.isnan(c[i])}
            for i in range(first, self.num)
        ]

    def series(self, names: Iterable[str] | None = None) -> dict[str, list[float | None]]:
        """Return columns of at most `MAX_POINTS` values, each the mean of equally many steps."""
        width = max(1, math.ceil(self.num / MAX_POINTS))
        wanted = self.columns if names is None else {*names, "step"}
        return {
            name: [_mean(column[i : i + width]) for i in range(0, self.num, width)]
            for name, column in list(self.columns.items())
            if name in wanted
        }


def _mean(values: Iterable[float]) -> float | None:
    """Return the mean of the known values with six digits."""
    numbers = [value for value in values if not math.isnan(value)]
    return float(f"{sum(numbers) / len(numbers):.6g}") if numbers else None


class OutcomeLog:
    """Sets the outcomes of indexed rows. Outcomes without a row wait until the row appears."""

    def __init__(self, run_dir: RunDir) -> None:
        self._steps = LineTail(run_dir.steps)
        self._outcomes = LineTail(run_dir.outcomes)
        self._waiting: dict[str, Settled] = {}
        self._has_outcomes = run_dir.outcomes.exists

    def refresh(self, rows: EpisodeRows) -> bool:
        """Read the new lines; return whether any outcome was found."""
        self._steps.is_new()
        self._outcomes.is_new()
        here = [each for each in self._waiting if each in rows.row_of]
        for episode_id in here:
            self._settle(rows, episode_id, self._waiting.pop(episode_id))
        num = 0
        for line in self._outcomes.lines():
            try:
                episode_id, outcome, cause, version = line
                trained_at = version if outcome == "trained" else -1
                self._settle(rows, str(episode_id), (str(outcome), str(cause), int(trained_at)))
                num += 1
            except (TypeError, ValueError) as error:
                self._outcomes.bad(error)
        for line in self._steps.lines():
            try:
                if "pruned" in line:
                    continue
                version = -1 if line.get("skipped") else int(line["version"])
                for episode_id, outcome, cause in line["outcomes"]:
                    trained_at = version if outcome == "trained" else -1
                    self._settle(rows, str(episode_id), (str(outcome), str(cause), trained_at))
                    num += 1
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                self._steps.bad(error)
        return num > 0

    def kept(self) -> list[Any] | None:
        """Return the JSON state for `restore`; None if lines are damaged.

        A new log then reads the damaged lines again and reports them.
        """
        if self._steps.problem or self._outcomes.problem:
            return None
        return [self._steps.place(), self._outcomes.place(), self._waiting]

    def restore(self, saved: list[Any]) -> bool:
        """Continue at the position of an earlier log; return False if the files were replaced."""
        steps, outcomes, waiting = saved
        if not (self._steps.go_to(steps) and self._outcomes.go_to(outcomes)):
            self._steps, self._outcomes = LineTail(self._steps.path), LineTail(self._outcomes.path)
            return False
        self._waiting = {name: (each[0], each[1], each[2]) for name, each in waiting.items()}
        return True

    def problems(self, *, has_steps: bool) -> list[str]:
        """Return the problems of the two files as messages."""
        texts = [tail.problem for tail in (self._steps, self._outcomes) if tail.problem]
        if has_steps and not self._has_outcomes():
            texts.append(
                f"{self._outcomes.path} is missing, as in runs of older versions. The outcome of"
                " episodes that were not trained on is unknown: filtered or stale."
            )
        return texts

    def absent(self, outcome: str) -> list[dict[str, str]]:
        """Return the settled episodes that never arrived, the newest first."""
        episodes = [
            {"id": episode_id, "outcome": settled[0], "cause": settled[1]}
            for episode_id, settled in list(self._waiting.items())
            if outcome in ("", settled[0])
        ]
        return episodes[::-1][:MAX_ABSENT]

    def _settle(self, rows: EpisodeRows, episode_id: str, settled: Settled) -> None:
        """Set the outcome of a row, or keep it until the row appears."""
        row = rows.row_of.get(episode_id)
        if row is None:
            self._waiting[episode_id] = settled
            return
        outcome, cause, trained_at = settled
        rows.settle(row, outcome=outcome, cause=cause, trained_at=trained_at)
