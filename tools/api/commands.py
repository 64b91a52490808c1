"""Training and evaluation from Python: the commands `train` and `eval`."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from common.store.run_dir import RunDir
from learner.journal.metrics import MetricsLine
from tools.api.policy import Policy, policy_words
from tools.api.program import POLL_S, CommandProcess, temporary_folder
from tools.api.references import NOTHING, Overrides, overrides_of
from tools.api.runs import Run
from tools.cli.requested import directory_of, load_named
from tools.dashboard.reading.run_source import LineTail


class Training:
    """A run that trains in processes of its own. It ends with this process at the latest.

    Example:
        with train("quickstart", {"run.name": "a"}) as training:
            for metrics in training:
                print(metrics["step"], metrics.get("reward/success"))
            print(training.policy.path)
    """

    def __init__(self, program: CommandProcess, run_dir: RunDir) -> None:
        """Observe a started command and the directory of its run."""
        self._program = program
        self._dir = run_dir

    @property
    def path(self) -> Path:
        """The run's directory."""
        return self._dir.root

    @property
    def run(self) -> Run:
        """The run, for reading. Raises: ConfigError: it has no files yet."""
        return Run(self._dir.root)

    @property
    def policy(self) -> Policy:
        """The policy of the newest checkpoint; after the end, the final one.

        Raises: ConfigError: there is no checkpoint yet.
        """
        return Policy(self._dir.root)

    @property
    def is_running(self) -> bool:
        """Whether the run still works."""
        return self._program.is_running

    @property
    def output(self) -> str:
        """The output of the command so far."""
        return self._program.output

    def __iter__(self) -> Iterator[MetricsLine]:
        """Yield the metrics of each step once, as they come, until the run ends.

        A resumed run begins with its first step. An interrupt of the wait for a step stops the run.

        Raises: ConfigError, ProgramFailed: the run ended with an error.
        """
        tail = LineTail(self._dir.metrics)
        last = -1.0
        try:
            while True:
                is_last = not self.is_running
                tail.is_new()
                for line in tail.lines() if self._has_begun() else ():
                    if line["step"] > last:  # A restarted learner logs some steps again.
                        last = line["step"]
                        yield line
                if is_last:
                    break
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            self.stop()
            raise
        self._program.check()

    def _has_begun(self) -> bool:
        """Return whether the directory is this run's: a finished one before it was renamed."""
        try:
            return self._dir.finished.stat().st_mtime >= self._program.started_at
        except FileNotFoundError:
            return True

    def wait(self, *, timeout_s: float | None = None) -> Run:
        """Wait for the end of the run, and return it for reading. An interrupt stops the run.

        Raises:
            TimeoutError: it still works after `timeout_s`.
            ConfigError, ProgramFailed: the run ended with an error.
        """
        self._program.wait(timeout_s=timeout_s)
        return self.run

    def stop(self) -> None:
        """Stop all roles in order: the learner saves a checkpoint, and `train` can resume."""
        self._program.stop()

    def __enter__(self) -> "Training":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def train(config: str | Path | None = None, overrides: Overrides = NOTHING) -> Training:
    """Start a training run, as `python run.py train` does, and return at once.

    Args:
        config: a name or a YAML file. None: the named run's own, or quickstart.
        overrides: values by key, or words key=value. Functions and an environment's class are
            sent to the roles by the path of their file.

    Raises: ConfigError: a key or a value is wrong, or a function has no file. Other checks of the
        start raise in `wait` and in the iteration.
    """
    program = CommandProcess("train", config=config, overrides=overrides)
    run_dir = directory_of(load_named(program.parsed()))
    program.start()
    return Training(program, run_dir)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """The scores of an evaluation."""

    label: str
    num_items: int
    num_episodes: int
    num_failed: int  # Episodes with an infrastructure failure, which the scores leave out.
    success: float | None  # Share of solved episodes.
    success_ci95: tuple[float, float] | None
    score: float | None  # Mean over the items.
    success_by_env: dict[str, float | None]
    row: dict[str, Any] = field(repr=False)  # The complete row, as in eval.json.


def evaluate(
    policy: str | Path | Run | None = None,
    *,
    config: str | Path | None = None,
    overrides: Overrides = NOTHING,
) -> EvalResult:
    """Play held-out items with a policy, as `python run.py eval` does, and return the scores.

    Args:
        policy: a model's folder, a run, or None: the model of the configuration, or the endpoint
            `policy.url`.

    Raises: ConfigError, ProgramFailed: the evaluation cannot start or is incomplete.
    """
    path = temporary_folder() / "scores.json"
    chosen = [] if policy is None else policy_words(policy)
    words = [*chosen, *overrides_of(overrides)]
    program = CommandProcess("eval", config=config, overrides=words, flags=["--json", str(path)])
    program.parsed()
    program.start()
    try:
        program.wait()
    finally:
        program.stop()
    row: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    overall = row["overall"]
    interval = overall["success"]["ci95"]
    return EvalResult(
        label=row["label"],
        num_items=overall["num_items"],
        num_episodes=overall["num_episodes"],
        num_failed=overall["num_failed"],
        success=overall["success"]["mean"],
        success_ci95=None if interval is None else tuple(interval),
        score=overall["score"]["mean"],
        success_by_env={env: each["success"]["mean"] for env, each in row["by_env"].items()},
        row=row,
    )
