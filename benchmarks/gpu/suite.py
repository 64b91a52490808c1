"""The suite `gpu`: the self-check of a CUDA machine, most informative checks first.

One process runs the checks. It is ended and started again if a check exceeds its time limit or
takes the process with it, so the checks that follow still run.
"""

import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.plan import GpuCheck, choose
from benchmarks.suite import BenchmarkFigure, Suite, finite, machine, versions
from common.errors import ConfigError
from common.host.child_process import ChildProcess, describe_exit
from common.host.machine import gpus
from common.repository import ROOT

WORKER = "benchmarks.gpu.worker"
READY_S = 180.0  # Limit for the imports of the process. The first import of torch is slow.
POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteRequest:
    """The choice of checks, the budget, and the file of the results."""

    only: str | None = None  # Names of checks with commas between them; None: all.
    minutes: float | None = None  # Budget of the whole suite; None: no budget.
    lines: Path | None = None  # File of JSON lines, which grows with each result.
    sizes: str = "gpu"  # Or small: on the CPU.


def run_suite(suite: Suite, request: SuiteRequest) -> None:
    """Check this CUDA machine.

    Raises: ConfigError: no CUDA device is available, or there is no such check.
    """
    checks = choose(request.only)
    if request.sizes == "gpu" and not gpus():
        raise ConfigError(
            "no CUDA device here (nvidia-smi lists none): nothing of this suite was measured."
            " --suite gpu-small runs the same checks at a small size on the CPU"
        )
    CheckRun(suite, request).run(checks)


class ResultLines:
    """Appends results to a file as JSON lines; without a file it does nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("", encoding="utf-8")

    def write(self, kind: str, values: dict[str, Any]) -> None:
        """Append one line."""
        if self._path is None:
            return
        line = json.dumps({"kind": kind, **finite(values)}, allow_nan=False)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")


class CheckProgress:
    """The state of a sequence of checks: the current one, the remaining ones, the time limits.

    Example:
        progress.handle({"kind": "start", "check": "step"})
        progress.overdue(limits)      "" until the limit of `step` has passed
        progress.handle({"kind": "end", "check": "step", "took_s": 31.0})
    """

    def __init__(
        self,
        checks: Sequence[GpuCheck],
        suite: Suite,
        lines: ResultLines,
        *,
        ends_at: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start no check yet; `ends_at` is the end of the budget on the clock."""
        self.remaining = list(checks)
        self.left_out: list[str] = []
        self.current: GpuCheck | None = None
        self.is_ready = False
        self._suite = suite
        self._lines = lines
        self._ends_at = ends_at
        self._clock = clock
        self._since = clock()  # Start of the process, or of the current check.

    def restart(self) -> None:
        """Begin again with a new process for the remaining checks."""
        self.is_ready = False
        self._since = self._clock()

    def handle(self, event: dict[str, Any]) -> None:
        """Apply one event of the process: write it into the table and to the results."""
        kind = event["kind"]
        values = {key: value for key, value in event.items() if key != "kind"}
        if kind == "ready":
            self.is_ready = True
            self._suite.title(values["device"])
        elif kind == "start":
            self.current = self._named(values["check"])
            self._since = self._clock()
        elif kind == "end":
            self._suite.title(f"{values['check']}: took {values['took_s']:.1f} s")
            self._finish()
        elif kind == "left_out":
            self.remaining.remove(self._named(values["check"]))
            self.left_out.append(values["check"])
            self._suite.note(values["check"], values["reason"])
        elif kind == "row":
            self._suite.add(BenchmarkFigure(**values))
        elif kind == "note":
            self._suite.note(**values)
        elif kind == "fail":
            self._suite.fail(**values)
        else:
            self._suite.title(values["text"])
        name = "" if self.current is None else self.current.name
        self._lines.write(kind, {"check": name, **values})

    def _named(self, name: str) -> GpuCheck:
        """Return a remaining check by its name."""
        return next(check for check in self.remaining if check.name == name)

    def _finish(self) -> None:
        """Remove the current check from the remaining ones."""
        assert self.current is not None
        self.remaining.remove(self.current)
        self.current = None

    def overdue(self) -> str:
        """Return why the process must be ended now; "" if it may continue."""
        now = self._clock()
        if not self.is_ready:
            is_late = now - self._since > READY_S
            return f"the process was not ready within {READY_S:g} s" if is_late else ""
        if self.current is None:
            return ""
        limit_s = self.current.limit_s
        if now - self._since > limit_s:
            return f"ended after its time limit of {limit_s:g} s"
        return "ended, because the time of --minutes is over" if now > self._ends_at else ""

    def abandon(self, reason: str) -> None:
        """Fail the current check, or all remaining ones if none had begun."""
        name = "the suite" if self.current is None else self.current.name
        self._suite.fail(name, reason)
        self._lines.write("fail", {"check": name, "name": name, "reason": reason})
        if self.current is not None:
            self._finish()
        else:
            self.remaining.clear()


class CheckRun:
    """Runs checks in a process, and starts it again after a check that took it down."""

    def __init__(self, suite: Suite, request: SuiteRequest) -> None:
        self._suite = suite
        self._request = request
        self._lines = ResultLines(request.lines)

    def run(self, checks: Sequence[GpuCheck]) -> None:
        """Run all checks, and write which ones were left out."""
        began = time.monotonic()
        minutes = self._request.minutes
        ends_at = math.inf if minutes is None else began + 60 * minutes
        self._lines.write("machine", {"machine": machine(), "versions": versions()})
        progress = CheckProgress(checks, self._suite, self._lines, ends_at=ends_at)
        while progress.remaining:
            progress.restart()
            self._run_process(progress, ends_at)
        if progress.left_out:
            self._suite.title(f"not measured: {', '.join(progress.left_out)}")
        self._suite.figure("the whole suite", time.monotonic() - began, "s")

    def _run_process(self, progress: CheckProgress, ends_at: float) -> None:
        """Follow one process until it has run the remaining checks, or must be ended."""
        with tempfile.TemporaryDirectory(prefix="longstride-gpu-") as folder:
            events = Path(folder) / "events.jsonl"
            events.touch()
            settings = {
                "sizes": self._request.sizes,
                "checks": [asdict(check) for check in progress.remaining],
                "ends_at": ends_at if math.isfinite(ends_at) else None,
                "events": str(events),
            }
            argv = [sys.executable, "-m", WORKER, json.dumps(settings)]
            log = Path(folder) / "worker.log"
            child = ChildProcess("gpu checks", argv, log_path=log, cwd=ROOT)
            try:
                _follow(child, events, progress)
            finally:
                child.clear_away()


def _follow(child: ChildProcess, events: Path, progress: CheckProgress) -> None:
    """Handle the events of a process until its end; end it if a check is overdue."""
    rest = ""  # The start of a line that is not complete.
    with events.open(encoding="utf-8") as file:
        while True:
            has_ended = child.has_ended_by(time.monotonic() + POLL_S)
            complete, _, rest = (rest + file.read()).rpartition("\n")
            for line in complete.splitlines():
                progress.handle(json.loads(line))
            if has_ended:
                if progress.remaining:
                    code = describe_exit(child.poll() or 0)
                    progress.abandon(f"the process ended: {code}; {child.last_error()}")
                return
            if reason := progress.overdue():
                progress.abandon(reason)
                return
