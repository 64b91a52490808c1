"""The suites `soak-run`: growth of the roles' memory, descriptors and threads during a run."""

import math
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.chaos.victims import Role, roles_below
from benchmarks.chaos.watch import StepObserver
from benchmarks.runs.real_run import TRAINING_ALONE, check_end, running
from benchmarks.table import BenchTable
from common.errors import LongstrideError
from common.launch.process import ChildProcess
from common.store.run_dir import RunDir

USUAL_S = 300.0
LONG_S = 3_600.0
SAMPLE_S = 5.0
FIRST_STEPS = 10  # Steps before the measurement.
START_S = 300.0
MAX_GROWTH_FRAC = 0.05
NUM_PARTS = 3  # Parts of the samples. Caches fill during the first.
MIB = 1 << 20
SETTINGS = (
    *TRAINING_ALONE,
    "train.num_steps=1000000",
    "horizon.kind=fixed",
    "horizon.stages=[10]",  # Longer episodes need more memory.
)
LEGEND = (
    "Of each role in three equal parts of the time: how much larger the median of resident memory\n"
    "is in the last part than in the one before, and by how much the least number of descriptors\n"
    "and threads has grown; what comes and goes is no leak."
)


@dataclass(slots=True)
class RoleFootprint:
    """The sizes of a role over time."""

    pids: set[int] = field(default_factory=set[int])
    rss_bytes: list[float] = field(default_factory=list[float])
    descriptors: list[float] = field(default_factory=list[float])
    threads: list[float] = field(default_factory=list[float])

    def add(self, process: psutil.Process) -> None:
        """Add a sample; do nothing if the process has just ended."""
        with suppress(psutil.NoSuchProcess), process.oneshot():
            rss_bytes = process.memory_info().rss
            num_fds = process.num_fds()
            num_threads = process.num_threads()
            self.pids.add(process.pid)
            self.rss_bytes.append(rss_bytes)
            self.descriptors.append(num_fds)
            self.threads.append(num_threads)


def parts(values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]] | None:
    """Return the second-last part and the last one; None without enough samples."""
    size = len(values) // NUM_PARTS
    return (values[-2 * size : -size], values[-size:]) if size else None


def growth_frac(values: Sequence[float]) -> float:
    """Return the relative growth of the median in the last part; NaN without enough samples."""
    if (found := parts(values)) is None:
        return math.nan
    return statistics.median(found[1]) / statistics.median(found[0]) - 1


def floor_growth(values: Sequence[float]) -> float:
    """Return the growth of the minimum in the last part; NaN without enough samples."""
    found = parts(values)
    return min(found[1]) - min(found[0]) if found else math.nan


def run_suite(table: BenchTable) -> None:
    """Measure a quickstart for five minutes."""
    soak(table, duration_s=USUAL_S)


def run_long(table: BenchTable) -> None:
    """Measure a quickstart for an hour."""
    soak(table, duration_s=LONG_S)


def soak(table: BenchTable, *, duration_s: float) -> None:
    """Train, sample the sizes and report the results."""
    table.title(LEGEND)
    with tempfile.TemporaryDirectory(prefix="longstride-soak-") as name:
        table.attempt("soak", lambda: _soak(table, Path(name), duration_s))


def _soak(table: BenchTable, folder: Path, duration_s: float) -> None:
    watch = StepObserver(RunDir(root=folder / "run"))
    sizes: dict[Role, RoleFootprint] = defaultdict(RoleFootprint)
    with running("run", SETTINGS, folder=folder) as child:
        _wait_for_steps(child, watch)
        began_s = time.monotonic()
        num_steps = watch.look()
        while time.monotonic() < began_s + duration_s:
            _check_runs(child)
            for role, processes in roles_below(child.pid).items():
                sizes[role].add(processes[0])
            time.sleep(SAMPLE_S)
        table.figure("steps", watch.look() - num_steps, "", f"in {duration_s:.0f} s")
    for role in Role:
        add_role(table, role, sizes[role])


def _wait_for_steps(child: ChildProcess, watch: StepObserver) -> None:
    deadline = time.monotonic() + START_S
    while watch.look() < FIRST_STEPS:
        _check_runs(child)
        if time.monotonic() > deadline:
            raise LongstrideError(f"no {FIRST_STEPS} steps within {START_S:g}s")
        time.sleep(SAMPLE_S / 10)


def _check_runs(child: ChildProcess) -> None:
    if child.poll() is not None:
        check_end(child)
        raise LongstrideError("the run has ended before it was measured")


def add_role(table: BenchTable, role: Role, sizes: RoleFootprint) -> None:
    """Write the growth of a role. A role that was restarted violates its bound."""
    table.at_most(f"{role}, restarts", len(sizes.pids) - 1, "", 0)
    rss = sizes.rss_bytes
    note = f"{rss[0] / MIB:.0f} -> {rss[-1] / MIB:.0f} MiB" if rss else "never seen"
    table.at_most(f"{role}, growth of memory", growth_frac(rss), "", MAX_GROWTH_FRAC, note)
    for name, values in (("descriptors", sizes.descriptors), ("threads", sizes.threads)):
        note = f"{values[0]:.0f} -> {values[-1]:.0f}" if values else "never seen"
        table.at_most(f"{role}, more {name}", floor_growth(values), "", 0, note)
