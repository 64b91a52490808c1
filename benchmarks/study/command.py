"""The suites of studies: the plan, the runs, their table."""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.real_run import await_success, check_end, child, running
from benchmarks.study.intervals import gap
from benchmarks.study.outcome import SeedResult, begin, read_outcome
from benchmarks.study.plan import CONFIG, PlannedRun, Study, merged, read_study
from benchmarks.study.tables import by_arm, study_table
from benchmarks.suite import Suite
from common.config.load import load_config
from common.errors import ConfigError, LongstrideError
from common.host.child_process import ChildProcess
from common.repository import ROOT
from common.store.run_dir import write_atomically
from tools.cli.bench import StudyConfig, StudySection
from tools.cli.command_line import ParsedCommand

logger = logging.getLogger(__name__)

RUN_S = 7200.0  # Limit of one run; a larger study has a proportionally larger one.
POLL_S = 0.5
NUM_SHOWN = 5  # Number of error messages to show of failed runs.


def measure(name: str, request: ParsedCommand, suite: Suite) -> None:
    """Run the study `name` and add its figures and table; a dry run prints the plan.

    Raises: ConfigError: an override is wrong, or the folder holds results of other settings.
    """
    cfg = load_config(CONFIG, request.overrides, schema=StudyConfig)
    work = study_work(name, cfg, request.overrides)
    for run in work.study.runs()[: len(work.study.arms)]:
        load_config(CONFIG, run.overrides)  # Every arm is checked before the first run.
    suite.title(work.plan_text())
    if not request.is_dry:
        work.make_start()
        work.run_all()
        report(work, suite)


def study_work(name: str, cfg: StudyConfig, overrides: Sequence[str]) -> "StudyWork":
    """Return the work of a study, in the configured folder."""
    study = read_study(name, cfg.study, overrides)
    size = "" if cfg.study.size == 1 else f"-x{cfg.study.size:g}"
    folder = ROOT / cfg.run.dir / (cfg.study.folder or f"study-{name}{size}")
    return StudyWork(study=study, folder=folder, section=cfg.study)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveRun:
    """A run that has been started; `own` stops it."""

    run: PlannedRun
    process: ChildProcess
    own: ExitStack
    ends_at: float  # Monotonic time of its limit.


@dataclass(slots=True, kw_only=True)
class StudyWork:
    """The runs of a study, each a directory in its folder, and the errors of failed ones."""

    study: Study
    folder: Path
    section: StudySection
    launch: Callable[..., AbstractContextManager[ChildProcess]] = running
    failed: dict[str, str] = field(default_factory=dict[str, str])  # Error message by run.

    def outcome_of(self, run: PlannedRun) -> SeedResult | None:
        """Return the outcome of a run, None if it has not finished.

        Raises: ConfigError: it was begun with other overrides.
        """
        made = self.folder / run.name
        if not (made / "report.json").exists():
            return None
        begin(made, run.overrides)
        return read_outcome(made, arm=run.arm, seed=run.seed)

    def todo(self) -> list[PlannedRun]:
        """Return the runs to execute.

        Raises: ConfigError: `study.only` names no run or arm of the study; as `outcome_of`.
        """
        only = set(self.section.only)
        runs = self.study.runs()
        if unknown := sorted(only - {run.name for run in runs} - self.study.arms.keys()):
            raise ConfigError(f"study.only={unknown[0]}: no run or arm of {self.study.name}")
        wanted = [run for run in runs if not only or only & {run.name, run.arm}]
        return [run for run in wanted if self.outcome_of(run) is None]

    def plan_text(self) -> str:
        """Return the number of runs, of completed runs, and the time of the others."""
        study = self.study
        runs = study.runs()
        todo = self.todo()
        num_done = sum(self.outcome_of(run) is not None for run in runs)
        total_h = study.cpu_s * study.size * len(todo) / 3600
        arms = f"{len(study.arms)} arms x {len(study.seeds)} seeds"
        return (
            f"study {study.name}: {arms} in {self.folder}\n"
            f"{len(runs)} runs; {num_done} done, {len(todo)} to do,"
            f" about {total_h:.1f} CPU hours, {total_h / 2:.1f} h of two cores"
        )

    def make_start(self) -> None:
        """Make the initial policy of all runs, unless it exists or the user has named one."""
        policy = self.folder / "start" / "policy"
        if not self._has_start() or (policy / "config.json").exists():
            return
        command, *words = self.study.start_words()
        where = [f"run.dir={self.folder}", "run.name=start"]
        self.folder.mkdir(parents=True, exist_ok=True)
        argv = ["run.py", command, "--config", CONFIG, *where, *words]
        with child("start", argv, log=self.folder / "start.log") as process:
            await_success(process, timeout_s=RUN_S)

    def _has_start(self) -> bool:
        """Return whether the runs begin with a policy that the study trains."""
        is_given = any(each.startswith("model.path=") for each in self.study.given)
        return bool(self.study.start) and not is_given

    def run_all(self) -> None:
        """Execute all incomplete runs. Failures are recorded, and the other runs continue."""
        self.folder.mkdir(parents=True, exist_ok=True)
        waiting = deque(self.todo())
        active: list[ActiveRun] = []
        with ExitStack() as stack:  # After an error or a signal it stops the active runs.
            while waiting or active:
                while waiting and len(active) < self.section.workers:
                    active.append(self._start(waiting.popleft(), stack))
                time.sleep(POLL_S)
                active = [each for each in active if not self._has_ended(each)]

    def _start(self, run: PlannedRun, stack: ExitStack) -> ActiveRun:
        """Start a run of the study."""
        begin(self.folder / run.name, run.overrides)
        start = [f"model.path={self.folder}/start/policy"] if self._has_start() else []
        overrides = ["log.live=false", *merged(run.overrides, start)]
        own = stack.enter_context(ExitStack())
        launched = self.launch(run.name, overrides, folder=self.folder, config=CONFIG)
        process = own.enter_context(launched)
        logger.info("started run=%s", run.name)
        limit_s = RUN_S * max(1.0, self.study.size)
        return ActiveRun(run=run, process=process, own=own, ends_at=time.monotonic() + limit_s)

    def _has_ended(self, active: ActiveRun) -> bool:
        """Return whether a run has ended or exceeded its limit, and record its failure."""
        is_over = active.process.poll() is not None
        if not is_over and time.monotonic() < active.ends_at:
            return False
        try:
            if not is_over:
                raise LongstrideError(f"not in time, see {active.process.log_path}")
            check_end(active.process)
        except LongstrideError as error:
            self.failed[active.run.name] = str(error)
            logger.error("failed run=%s: %s", active.run.name, error)
        active.own.close()
        return True


def report(work: StudyWork, suite: Suite) -> None:
    """Add the figures of all completed runs, the errors of failed ones, and the table."""
    study = work.study
    found = {run.name: work.outcome_of(run) for run in study.runs()}
    outcomes = [each for each in found.values() if each is not None]
    for each in outcomes:
        note = f"seed {each.seed}, {each.cpu_s:.0f} CPU s"
        suite.figure(f"{each.arm}, seed {each.seed}: success after", each.after, "", note)
    for name, why in list(work.failed.items())[:NUM_SHOWN]:
        suite.fail(name, why)
    missing = [name for name, each in found.items() if each is None]
    if missing:
        suite.note(
            "not done", f"{len(missing)} of {len(found)} runs: {', '.join(missing[:NUM_SHOWN])}"
        )
    if not outcomes:
        return
    arms = list(study.arms)
    outcomes.sort(key=lambda each: arms.index(each.arm))
    add_losses(suite, study, outcomes)
    text = study_table(outcomes, base=study.base)
    write_atomically(work.folder / "table.md", text)
    suite.title(text.rstrip())


def add_losses(suite: Suite, study: Study, outcomes: Sequence[SeedResult]) -> None:
    """Compare the loss of each arm that has a bound with the base arm."""
    arms = by_arm(outcomes)
    for arm, bound in study.may_lose.items():
        if {arm, study.base} <= arms.keys():
            after = {name: [each.after for each in arms[name]] for name in (arm, study.base)}
            lost, (low, high) = gap(after[study.base], after[arm])
            note = f"95 %: {100 * low:.1f} to {100 * high:.1f}"
            suite.at_most(f"{arm} loses against {study.base}", 100 * lost, "points", bound, note)
