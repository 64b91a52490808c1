"""A run's metrics as columns, read incrementally."""

import math
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common.store.status.json_files import as_map
from tools.dashboard.reading.line_tail import LineTail

MAX_POINTS = 1000  # Maximum number of points of a series. Longer series are averaged in bins.


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
        for found in self._tail.lines():
            line = as_map(found)
            if not isinstance(line.get("step"), int | float):
                self._tail.bad(ValueError("not a JSON object with a step"))
                continue
            self._add(line)
        return is_other or self.num > before

    def _add(self, line: dict[str, Any]) -> None:
        """Add a step. `num` grows last, so that concurrent readers get complete steps only."""
        known = {name: value for name, value in line.items() if isinstance(value, int | float)}
        if new := known.keys() - self.columns.keys():
            unknown = array("d", [math.nan]) * self.num
            self.columns = self.columns | {name: unknown[:] for name in known if name in new}
        for name, column in self.columns.items():
            column.append(known.get(name, math.nan))
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
    known = [value for value in values if not math.isnan(value)]
    return float(f"{sum(known) / len(known):.6g}") if known else None
