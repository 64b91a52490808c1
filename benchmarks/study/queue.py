"""Executes the runs of a study: in this process, in child processes, or on Ray nodes.

The outcome of a run is stored as RUN.json in the study's folder. A stopped study can therefore be
resumed with the runs that have no outcome.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from benchmarks.runs.real_run import check_end, running
from benchmarks.study.outcome import (
    SeedResult,
    begin,
    is_begun,
    load_outcome,
    read_outcome,
    save_outcome,
)
from benchmarks.study.plan import Does, Run, Study
from common.config.evaluation import StudySection
from common.errors import ConfigError, LongstrideError
from common.launch.guardian import Guardian
from common.launch.process import ChildProcess
from common.repository import ROOT
from common.store.run_dir import write_atomically

logger = logging.getLogger(__name__)

RUN_S = 3600.0  # Limit of one run; a larger study has a proportionally larger one.
LOOK_S = 0.5  # Interval at which a run checks whether the study was stopped.
STOP_S = 60.0

# The bool is True if the controller ever acted.
Perform = Callable[[Run, Path], tuple[SeedResult, bool]]


class Stopped(LongstrideError):
    """The study was stopped during this run."""


@dataclass(slots=True)
class Queue:
    """The incomplete runs of a study, and the errors of failed ones."""

    study: Study
    folder: Path
    section: StudySection
    place_timeout_s: float = 300.0  # Time to wait for resources on a Ray cluster.
    perform: dict[Does, Perform] = field(default_factory=dict[Does, Perform])
    failed: dict[str, str] = field(default_factory=dict[str, str])  # Error message by run.
    stop: threading.Event = field(default_factory=threading.Event)
    _known_firsts: dict[str, str] = field(default_factory=dict[str, str])

    def _firsts(self) -> dict[str, str]:
        self._known_firsts = self._known_firsts or self.study.firsts()
        return self._known_firsts

    def path_of(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def outcome_of(self, run: Run) -> SeedResult | None:
        """Return the outcome of a run, under its own arm's name; None if it is incomplete.

        Raises: ConfigError: it was made with other overrides.
        """
        first = self._firsts()[run.name]
        if (known := self._known(first, run)) is None:
            return None
        return replace(known, arm=run.arm.name)

    def _known(self, name: str, run: Run) -> SeedResult | None:
        path = self.path_of(name)
        made = self.folder / name
        if path.exists():
            outcome, told = load_outcome(path)
            self._check(path, told, run)
            return outcome
        is_ours = run.arm.does is Does.TRAIN and is_begun(made, run.overrides)
        if is_ours and (made / "report.json").exists():
            outcome = read_outcome(made, arm=run.arm.name, seed=run.seed)
            save_outcome(outcome, path, run.overrides)
            return outcome
        return None

    def _check(self, path: Path, told: Sequence[str], run: Run) -> None:
        wanted = list(run.overrides)
        if sorted(told) != sorted(wanted):
            differ = sorted(set(told) ^ set(wanted))
            raise ConfigError(
                f"{path} is of other settings ({', '.join(differ)}): give study.folder=NAME for"
                " another study, or remove it"
            )

    def todo(self) -> list[Run]:
        """Return the runs to execute. Of identical runs only the first is returned.

        Raises: ConfigError: `study.only` names no run or arm of the study; as `outcome_of`.
        """
        only = self.section.only
        runs = self.study.runs()
        firsts = self._firsts()
        known = {run.name for run in runs} | {run.arm.name for run in runs}
        if unknown := sorted(set(only) - known):
            raise ConfigError(f"study.only={unknown[0]}: no run or arm of {self.study.name}")
        wanted = {firsts[r.name] for r in runs if not only or {r.name, r.arm.name} & set(only)}
        return [run for run in runs if run.name in wanted and self.outcome_of(run) is None]

    def work(self) -> None:
        """Execute all incomplete runs.

        Failures are recorded in `failed`, and the other runs continue.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        chunks = self.study.chunks(self.todo())
        make = self._worker()
        with ThreadPoolExecutor(self.section.workers) as pool:
            futures = [pool.submit(self._guarded, make, chunk) for chunk in chunks]
            try:
                for future in futures:
                    future.result()
            finally:
                self.stop.set()  # Needed after an error or a signal; otherwise all runs have ended.

    def _worker(self) -> Callable[[list[Run]], None]:
        if self.section.on_ray:
            from benchmarks.study.ray_jobs import Jobs  # The import of Ray takes seconds.

            jobs = Jobs(stop=self.stop, place_timeout_s=self.place_timeout_s)
            return partial(self._on_ray, jobs.perform)
        is_alone = self.section.workers == 1
        is_in_process = all(arm.does is Does.IN_PROCESS for arm in self.study.arms)
        return self._beside if is_in_process and not is_alone else self._here

    def _guarded(self, make: Callable[[list[Run]], None], chunk: list[Run]) -> None:
        if self.stop.is_set():
            return
        try:
            make(chunk)
        except ConfigError:
            raise
        except LongstrideError as error:
            missing = [run.name for run in chunk if not self.path_of(run.name).exists()]
            self.failed |= dict.fromkeys(missing[:1] or [chunk[0].name], str(error))
            logger.error("failed run=%s: %s", missing[:1], error)

    def _here(self, chunk: list[Run]) -> None:
        """Execute the runs one after the other; a failed run does not stop the others."""
        for run in chunk:
            if self.stop.is_set():
                return
            if self.path_of(run.name).exists():  # The twin has written the outcome.
                continue
            logger.info("run name=%s", run.name)
            try:
                self._make(run, chunk)
            except Stopped:
                return
            except ConfigError:
                raise
            except LongstrideError as error:
                logger.error("failed run=%s: %s", run.name, error)
                self.failed[run.name] = str(error)

    def _make(self, run: Run, chunk: Sequence[Run]) -> None:
        outcome, has_acted = self._perform(run)
        save_outcome(outcome, self.path_of(run.name), run.overrides)
        for other in chunk:
            if other.arm.twin == run.arm.name and not has_acted:
                save_outcome(
                    replace(outcome, same_as=run.name), self.path_of(other.name), other.overrides
                )

    def _perform(self, run: Run) -> tuple[SeedResult, bool]:
        if run.arm.does in self.perform:
            return self.perform[run.arm.does](run, self.folder)
        begin(self.folder / run.name, run.overrides)
        self.train(run.name, run.overrides)
        made = self.folder / run.name
        return read_outcome(made, arm=run.arm.name, seed=run.seed), True

    def train(self, name: str, overrides: Sequence[str]) -> None:
        """Execute a whole run. Raises: Stopped; LongstrideError: it failed, or was not in time."""
        timeout_s = RUN_S * max(1.0, self.study.size)
        own = ["log.live=false", *overrides]
        with (
            closing(Guardian()) as guardian,
            running(name, own, folder=self.folder, guardian=guardian) as child,
        ):
            self.await_end(child, timeout_s=timeout_s)

    def run_command(self, name: str, argv: Sequence[str]) -> None:
        """Run `run.py ...`, logged as the run `name`. Raises: as `train`."""
        with closing(Guardian()) as guardian:
            log = self.folder / f"{name}.log"
            told = [sys.executable, "run.py", *argv]
            child = ChildProcess(name, told, log_path=log, cwd=ROOT, guardian=guardian)
            try:
                self.await_end(child, timeout_s=RUN_S)
            finally:
                child.stop(timeout_s=STOP_S)

    def await_end(self, child: ChildProcess, *, timeout_s: float) -> None:
        """Wait for a child. Raises: Stopped; LongstrideError: it failed, or was not in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            if self.stop.is_set():
                raise Stopped(f"run {child.name} was stopped with its study")
            if child.has_ended_by(min(deadline, time.monotonic() + LOOK_S)):
                break
            if time.monotonic() >= deadline:
                raise LongstrideError(
                    f"run {child.name} has not ended within {timeout_s:g}s, see {child.log_path}"
                )
        check_end(child)

    def command(self, chunk: Sequence[Run], *, folder: str, run_dir: str) -> list[str]:
        """Return the command that executes a chunk in its own process, with results in `folder`."""
        section = self.section
        only = ",".join(run.name for run in chunk)
        return [
            "run.py",
            "bench",
            "--suite",
            self.study.name,
            "--json",
            f"{run_dir}/chunk.json",
            f"study.only=[{only}]",
            "study.workers=1",
            f"study.size={section.size}",
            f"study.num_seeds={section.num_seeds}",
            f"study.folder={folder}",
            f"run.dir={run_dir}",
            *self.study.given,
        ]

    def _limit_s(self, chunk: Sequence[Run]) -> float:
        return RUN_S * len(chunk) * max(1.0, self.study.size)

    def _beside(self, chunk: list[Run]) -> None:
        """Execute a chunk in a separate process, which ends with this one."""
        name = f"{chunk[0].arm.chunk or chunk[0].arm.name}-seed{chunk[0].seed}"
        run_dir = str(self.folder.parent.resolve())
        argv = [sys.executable, *self.command(chunk, folder=self.folder.name, run_dir=run_dir)]
        argv[argv.index("--json") + 1] = str(self.folder.resolve() / f".{name}.bench.json")
        log = self.folder / f"{name}.log"
        threads = {"OMP_NUM_THREADS": "1"}
        with closing(Guardian()) as guardian:
            child = ChildProcess(name, argv, log_path=log, cwd=ROOT, env=threads, guardian=guardian)
            try:
                self.await_end(child, timeout_s=self._limit_s(chunk))
            finally:
                child.stop(timeout_s=STOP_S)

    def _on_ray(self, perform: Callable[..., dict[str, str]], chunk: list[Run]) -> None:
        """Execute a chunk on a node that Ray chooses; its results are returned as text."""
        argv = self.command(chunk, folder="results", run_dir="{here}")
        told = {"keep": "results/*.json", "timeout_s": self._limit_s(chunk)}
        for name, text in perform(argv, **told).items():
            write_atomically(self.folder / name, text)
        if missing := [run.name for run in chunk if not self.path_of(run.name).exists()]:
            raise LongstrideError(f"on Ray, no result of {', '.join(missing)}")
