"""A table of measured figures, each beside the bound that it promises to keep."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TextIO

from common.errors import LongstrideError

logger = logging.getLogger(__name__)

WIDTHS = (58, 14, 16)
# Of torch and CUDA, of engines and children, of the numbers; a mistake in our code is none of them.
MACHINE_ERRORS = (
    *(LongstrideError, RuntimeError, OSError, ImportError),
    *(ArithmeticError, AssertionError, LookupError, ValueError),
)


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

    def at_most(self, name: str, value: float, unit: str, bound: float, note: str = "") -> None:
        """Write a figure that promises not to be larger than `bound`; a NaN keeps no promise."""
        self._judge((name, f"{value:.4g} {unit}", f"at most {bound:g}"), value <= bound, note)

    def at_least(self, name: str, value: float, unit: str, bound: float, note: str = "") -> None:
        """Write a figure that promises not to be smaller than `bound`; a NaN keeps no promise."""
        self._judge((name, f"{value:.4g} {unit}", f"at least {bound:g}"), value >= bound, note)

    def _judge(self, cells: tuple[str, str, str], is_kept: bool, note: str) -> None:
        text = "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, WIDTHS, strict=True))
        self._write(f"{'kept' if is_kept else 'FAIL'}  {text}  {note}".rstrip())
        if not is_kept:
            self.failed.append(cells[0])

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
