"""A table of measured figures, each beside the bound that it promises to keep."""

import logging
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TextIO

from common.errors import LongstrideError

logger = logging.getLogger(__name__)

WIDTHS = (58, 14, 16)
# Of torch and CUDA, of engines and children, of the numbers; a mistake in our code is none of them.
MACHINE_ERRORS = (
    *(LongstrideError, RuntimeError, OSError, ImportError),
    *(ArithmeticError, AssertionError, LookupError, ValueError),
)


class Law(StrEnum):
    """How a figure is held against its bound; a NaN keeps none."""

    AT_MOST = "at most"
    AT_LEAST = "at least"


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number and what it has to be."""

    name: str
    value: float
    unit: str  # "" for a ratio
    law: Law
    bound: float
    note: str = ""  # spread, size, what it was measured with

    @property
    def is_kept(self) -> bool:
        """True if the value is inside its bound."""
        relation = operator.le if self.law is Law.AT_MOST else operator.ge
        return relation(self.value, self.bound)


@dataclass(slots=True, kw_only=True)
class BenchTable:
    """Writes figures as they come and remembers which broke their promise.

    Example:
        table = BenchTable(out=sys.stdout)
        table.at_least("copy", 11.0, "GB/s", 5.0)
        table.fail("weights", "the child ended with exit code 1")
        return table.finish()           1, because something failed
    """

    out: TextIO
    failed: list[str] = field(default_factory=lambda: [])

    def title(self, text: str) -> None:
        """Write a line above the figures that follow."""
        self._write(text)

    def add(self, figure: Figure) -> None:
        """Write a figure; it counts as failed outside its bound."""
        measured = f"{figure.value:.4g} {figure.unit}".rstrip()
        bound = f"{figure.law.value} {figure.bound:g}"
        verdict = "kept" if figure.is_kept else "FAIL"
        cells = (figure.name, measured, bound)
        text = "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, WIDTHS, strict=True))
        self._write(f"{verdict}  {text}  {figure.note}".rstrip())
        if not figure.is_kept:
            self.failed.append(figure.name)

    def at_most(self, name: str, value: float, unit: str, bound: float, note: str = "") -> None:
        """Write a figure that promises not to be larger than `bound`."""
        self.add(Figure(name, value, unit, Law.AT_MOST, bound, note))

    def at_least(self, name: str, value: float, unit: str, bound: float, note: str = "") -> None:
        """Write a figure that promises not to be smaller than `bound`."""
        self.add(Figure(name, value, unit, Law.AT_LEAST, bound, note))

    def note(self, name: str, text: str) -> None:
        """Write what was not measured, and why."""
        self._write(f"note  {name}: {text}")

    def fail(self, name: str, reason: str) -> None:
        """Write that something could not be measured although it should have been."""
        self._write(f"FAIL  {name}: {' '.join(reason.split())}")
        self.failed.append(name)

    def attempt(self, name: str, measure: Callable[[], None]) -> None:
        """Run one check; what the machine does to it makes a FAIL line, and the next still runs."""
        try:
            measure()
        except MACHINE_ERRORS as error:
            logger.debug("check failed name=%s", name, exc_info=True)
            self.fail(name, f"{type(error).__name__}: {error}"[:400])

    def finish(self) -> int:
        """Write the verdict on everything; return the exit code, 1 if anything failed."""
        failed = ", ".join(self.failed)
        self._write(f"NOT KEPT: {failed}" if failed else "every promise kept")
        return 1 if self.failed else 0

    def _write(self, line: str) -> None:
        self.out.write(f"{line}\n")
        self.out.flush()
