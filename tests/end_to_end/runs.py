"""Starts real runs of the product for the end-to-end tests, and reads what they leave behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import psutil

from learner.journal.metrics import read_metrics

REPOSITORY = Path(__file__).resolve().parents[2]
NO_VARIABLES: Mapping[str, str] = {}  # Beside those of the test itself.
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
CLOSED_PROXY = {
    **dict.fromkeys([*PROXIES, *(name.upper() for name in PROXIES)], "http://127.0.0.1:9"),
    **dict.fromkeys(["no_proxy", "NO_PROXY"], ""),
}
RUN_S = 600.0  # slow cores that others share
JOINED_STOP_S = 15.0  # Seconds for a joined actor to end after SIGTERM.


class Run:
    """One `python run.py` with its run directory below a test's own folder."""

    def __init__(
        self,
        folder: Path,
        *overrides: str,
        config: str = "smoke",
        python: str = sys.executable,
        env: Mapping[str, str] = NO_VARIABLES,
        checkout: Path = REPOSITORY,
    ) -> None:
        self.root = folder / "r"
        argv = [python, "run.py", "--config", config, f"run.dir={folder}", "run.name=r"]
        self._output = (folder / "output.txt").open("ab")
        self.process = subprocess.Popen(
            [*argv, *overrides],
            cwd=checkout,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **env, "LONGSTRIDE_TEST_MARK": str(folder)},
        )
        self._folder = folder

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        """End the remaining processes by id."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(15)
        self._output.close()
        for left in self.left_over():
            with suppress(ProcessLookupError):  # It has just ended.
                os.kill(left, signal.SIGKILL)

    @property
    def output(self) -> str:
        """What the command printed."""
        return (self._folder / "output.txt").read_text(errors="replace", encoding="utf-8")

    def wait(self, *, timeout_s: float = RUN_S) -> int:
        """Return the exit code. Raises: TimeoutExpired."""
        return self.process.wait(timeout_s)

    def wait_until(self, happened: Callable[[], bool], *, timeout_s: float = RUN_S) -> None:
        """Wait for something visible in the run directory. Raises: AssertionError."""
        deadline = time.monotonic() + timeout_s
        while not happened():
            assert self.process.poll() is None, f"ended early: {self.output[-2_000:]}"
            assert time.monotonic() < deadline, f"did not happen: {self.output[-2_000:]}"
            time.sleep(0.1)

    def probe(self, kind: str) -> str:
        """Return what `status --probe` prints of the run; its exit code must agree."""
        argv = [sys.executable, "run.py", "status", "--probe", kind]
        where = [f"run.dir={self._folder}", "run.name=r"]
        done = subprocess.run(
            [*argv, *where], cwd=REPOSITORY, capture_output=True, encoding="utf-8", timeout=240
        )
        told = done.stdout.strip().removeprefix(f"{self.root}: ")
        assert (done.returncode == 0) == (told == kind), done
        return told

    def read(self, name: str) -> dict[str, Any]:
        """Return a JSON file of the run directory."""
        return json.loads((self.root / name).read_text(encoding="utf-8"))

    def metrics(self) -> list[dict[str, Any]]:
        """Return the complete lines of metrics.jsonl so far."""
        return [*read_metrics(self.root / "metrics.jsonl")]

    def role_pids(self, role: str) -> list[int]:
        """Return the process ids of a role's own processes that run."""
        found: list[int] = []
        for child in psutil.Process(self.process.pid).children():
            with suppress(psutil.NoSuchProcess):  # a zombie, too
                arguments = child.cmdline()
                if "run.py" in " ".join(arguments) and role in arguments:
                    found.append(child.pid)
        return found

    def role_pid(self, role: str) -> int:
        """Return the process id of the only process of a role."""
        (pid,) = self.role_pids(role)
        return pid

    def left_over(self) -> list[int]:
        """Return the ids of this run's processes that are still there, itself excepted."""
        mark = f"LONGSTRIDE_TEST_MARK={self._folder}"
        found = []
        for process in psutil.process_iter():
            try:
                environment = process.environ()
            except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
            if environment.get("LONGSTRIDE_TEST_MARK") == mark.partition("=")[2]:
                found.append(process.pid)
        return [pid for pid in found if pid != self.process.pid]


def unbounded(root: Path) -> list[str]:
    """Return the files of a run that docs/JOURNAL.md names no bound of."""
    files = [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]
    return [each for each in files if not any(fnmatch(each, name) for name in bounded())]


def bounded() -> list[str]:
    """Return the patterns of files that docs/JOURNAL.md names a bound of."""
    table = (
        (REPOSITORY / "docs" / "JOURNAL.md").read_text(encoding="utf-8").partition("| bound |")[2]
    )
    cells = [line.split("|")[1] for line in table.split("\n\n")[0].splitlines()[2:]]
    patterns = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    assert len(patterns) > 40
    return patterns


def balances(ledger: dict[str, Any]) -> bool:
    """Return True if every issued episode is accounted for."""
    parts = ("trained", "filtered", "stale", "failed", "in_flight")
    return ledger["issued"] == sum(ledger[part] for part in parts) and ledger["lost"] == 0


@contextmanager
def joining(run: Run, name: str, *overrides: str) -> Iterator[None]:
    """Start one more actor of the run in the block."""
    where = (f"run.dir={run.root.parent}", "run.name=r", f"actor.name={name}")
    with (run.root.parent / f"{name}.txt").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "run.py", "actor", *where, *overrides],
            cwd=REPOSITORY,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        )
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(JOINED_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
