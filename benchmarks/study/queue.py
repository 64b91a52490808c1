"""Executes the runs of a study: in this process, in child processes, or on Ray nodes.

The outcome of a run is stored as RUN.json in the study's folder. A stopped study can therefore be
resumed with the runs that have no outcome.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from benchmarks.runs.real_run import STOP_S, check_end, child
from benchmarks.study.outcome import (
    SeedResult,
    begin,
    is_begun,
    load_outcome,
    read_outcome,
    save_outcome,
)
from benchmarks.study.plan import CONFIG, Does, Run, Study
from common.config.evaluation import StudySection
from common.errors import ConfigError, LongstrideError
from common.store.run_dir import write_atomically

logger = logging.getLogger(__name__)

RUN_S = 3600.0  # Limit of one run; a larger study has a proportionally larger one.
LOOK_S = 0.5  # Interval at which a run checks whether the study was stopped.

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
        name = self._firsts()[run.name]
        path = self.path_of(name)
        if path.exists():
            outcome, overrides = load_outcome(path)
            if differ := sorted(set(overrides) ^ set(run.overrides)):
                raise ConfigError(
                    f"{path} is of other settings ({', '.join(differ)}): give study.folder=NAME"
                    " for another study, or remove it"
                )
            return replace(outcome, arm=run.arm.name)
        made = self.folder / name
        is_ours = run.arm.does is Does.TRAIN and is_begun(made, run.overrides)
        if not is_ours or not (made / "report.json").exists():
            return None
        outcome = read_outcome(made, arm=run.arm.name, seed=run.seed)
        save_outcome(outcome, path, run.overrides)
        return outcome

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
        """Execute all incomplete runs. Failures are recorded, and the other runs continue."""
        self.folder.mkdir(parents=True, exist_ok=True)
        chunks = self.study.chunks(self.todo())
        make = self._worker()
        with ThreadPoolExecutor(self.section.workers) as pool:
            futures = [pool.submit(self._guarded, partial(make, each), each) for each in chunks]
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

    def _guarded(self, make: Callable[[], None], runs: list[Run]) -> None:
        """Make some runs, and record an error for the first run without an outcome."""
        if self.stop.is_set():
            return
        try:
            make()
        except (ConfigError, Stopped):
            raise
        except LongstrideError as error:
            missing = [run.name for run in runs if not self.path_of(run.name).exists()]
            failed = (missing or [runs[0].name])[0]
            self.failed[failed] = str(error)
            logger.error("failed run=%s: %s", failed, error)

    def _here(self, chunk: list[Run]) -> None:
        """Execute the runs one after the other; a failed run does not stop the others."""
        for run in chunk:
            if not self.path_of(run.name).exists():  # The twin may have written the outcome.
                self._guarded(partial(self._make, run, chunk), [run])

    def _make(self, run: Run, chunk: Sequence[Run]) -> None:
        logger.info("run name=%s", run.name)
        perform = self.perform.get(run.arm.does, self._train)
        outcome, has_acted = perform(run, self.folder)
        save_outcome(outcome, self.path_of(run.name), run.overrides)
        for other in chunk:
            if other.arm.twin == run.arm.name and not has_acted:
                same = replace(outcome, same_as=run.name)
                save_outcome(same, self.path_of(other.name), other.overrides)

    def _train(self, run: Run, folder: Path) -> tuple[SeedResult, bool]:
        """Execute a whole run."""
        begin(folder / run.name, run.overrides)
        own = [f"run.dir={folder}", f"run.name={run.name}", "log.live=false"]
        argv = ["train", "--config", CONFIG, *own, *run.overrides]
        self.run_command(run.name, argv, timeout_s=self._limit_s([run]))
        return read_outcome(folder / run.name, arm=run.arm.name, seed=run.seed), True

    def run_command(
        self,
        name: str,
        argv: Sequence[str],
        *,
        timeout_s: float = RUN_S,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Run `run.py ...`, logged as the run `name`.

        Raises: Stopped; LongstrideError: it failed, or was not in time.
        """
        log = self.folder / f"{name}.log"
        deadline = time.monotonic() + timeout_s
        with child(f"run {name}", ["run.py", *argv], log=log, env=env, stop_s=STOP_S) as process:
            while not self.stop.is_set():
                if process.has_ended_by(min(deadline, time.monotonic() + LOOK_S)):
                    check_end(process)
                    return
                if time.monotonic() >= deadline:
                    raise LongstrideError(f"run {name} takes over {timeout_s:g}s, see {log}")
        raise Stopped(f"run {name} was stopped with its study")

    def command(self, chunk: Sequence[Run], *, folder: str, run_dir: str, json: str) -> list[str]:
        """Return the command that executes a chunk in its own process, with results in `folder`."""
        section = self.section
        return [
            *["bench", "--suite", self.study.name, "--json", json],
            f"study.only=[{','.join(run.name for run in chunk)}]",
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
        here = self.folder.resolve()
        figures = str(here / f".{name}.bench.json")
        argv = self.command(chunk, folder=here.name, run_dir=str(here.parent), json=figures)
        threads = {"OMP_NUM_THREADS": "1"}
        self.run_command(name, argv, timeout_s=self._limit_s(chunk), env=threads)

    def _on_ray(self, perform: Callable[..., dict[str, str]], chunk: list[Run]) -> None:
        """Execute a chunk on a node that Ray chooses; its results are returned as text."""
        words = self.command(chunk, folder="results", run_dir="{here}", json="{here}/chunk.json")
        options = {"keep": "results/*.json", "timeout_s": self._limit_s(chunk)}
        for name, text in perform(["run.py", *words], **options).items():
            write_atomically(self.folder / name, text)
        if missing := [run.name for run in chunk if not self.path_of(run.name).exists()]:
            raise LongstrideError(f"on Ray, no result of {', '.join(missing)}")
