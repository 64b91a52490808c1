"""The command `simulate`: predict a run, compare it with a measured one, recommend settings."""

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from common.config.train import TrainMode
from common.errors import ConfigError
from common.store.run_dir import write_json
from tools.simulator.config import SimulatorConfig
from tools.simulator.measured import MeasuredPace, load_measured, load_workload
from tools.simulator.search import Recommendation, Trial, advise
from tools.simulator.workload import SampledWorkload, Workload
from tools.simulator.world import Prediction, SimulatedRun

LABEL_WIDTH = 34
WIDTH = 14
MAX_LAGS = 10  # Maximum number of rows of the histogram.
BAR = 40
BOTH = "both"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One figure of the simulation beside its measured value."""

    name: str
    predicted: float
    measured: float

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "relative_error": self.relative_error if self.measured else None}

    @property
    def relative_error(self) -> float:
        """The relative error, positive if the prediction is too high; nan without a measurement."""
        return self.predicted / self.measured - 1.0 if self.measured else float("nan")


def compare(prediction: Prediction, measured: MeasuredPace) -> list[Compared]:
    """Return the figures that both have, side by side."""
    names = ("steps_per_h", "lag_mean", "learner_wait_frac")
    return [
        Compared(name=name, predicted=getattr(prediction, name), measured=getattr(measured, name))
        for name in names
    ]


def format_predictions(predictions: Sequence[Prediction]) -> str:
    """Return a table with a column for each prediction, and the lags of the first."""
    rows = json.loads(Path(__file__).with_name("rows.json").read_text(encoding="utf-8"))
    lines = [
        f"{label:<{LABEL_WIDTH}}"
        + "".join(
            f"{form.format(getattr(prediction, name)):>{WIDTH}}" for prediction in predictions
        )
        for label, name, form in rows
    ]
    lines += [
        f"the run would have stopped: {prediction.stopped_by}"
        for prediction in predictions
        if prediction.stopped_by
    ]
    return "\n".join([*lines, "", *_histogram(predictions[0].lag_counts)]) + "\n"


def _histogram(counts: dict[int, int]) -> list[str]:
    """Return the lines of a histogram of lags."""
    total = max(1, sum(counts.values()))
    lines = ["lag of consumed episodes (oldest turn)"]
    for lag, num in sorted(counts.items())[:MAX_LAGS]:
        frac = num / total
        lines.append(f"{lag:>4} {frac:>7.1%} {'#' * round(BAR * frac)}")
    return lines


def format_comparison(compared: Sequence[Compared]) -> str:
    """Return the table of predicted and measured figures."""
    head = f"{'':<{LABEL_WIDTH}}{'predicted':>{WIDTH}}{'measured':>{WIDTH}}{'error':>{WIDTH}}"
    lines = [
        f"{figure.name:<{LABEL_WIDTH}}{figure.predicted:>{WIDTH}.3f}{figure.measured:>{WIDTH}.3f}"
        f"{figure.relative_error:>+{WIDTH}.1%}"
        for figure in compared
    ]
    return "\n".join([head, *lines]) + "\n"


def format_advice(advice: Recommendation) -> str:
    """Return the recommended settings, and all trials."""
    lines = [
        "recommended at the longest horizon, with one machine for each actor:",
        f"  actors {advice.num_actors}, scheduler.max_ahead_steps={advice.max_ahead_steps}"
        f" learner.max_lag_steps={advice.max_lag_steps} groups.size={advice.group_size}"
        f" groups.per_step={advice.groups_per_step}",
        *_trial_lines("max_ahead_steps", advice.ahead_trials),
        *_trial_lines("actors", advice.actor_trials),
        *_trial_lines("groups.size", advice.size_trials),
    ]
    return "\n".join(lines) + "\n"


def _trial_lines(name: str, trials: Sequence[Trial]) -> list[str]:
    """Return a line for each trial of a setting."""
    return [
        f"  {name:>16} {trial.value:>6}: {trial.trained_per_h:>10.0f} trained per hour,"
        f" lag {trial.lag_mean:.2f}, actors idle {trial.actor_idle_frac:.0%}"
        for trial in trials
    ]


def run(cfg: SimulatorConfig, out: TextIO) -> int:
    """Simulate a run; return the exit code.

    The table is written to `out`, and all findings to `simulator.output`. The same configuration
    and seed give the same result. Exit code 1: a real run would have ended with an error, which the
    table shows.

    Raises: ConfigError: no task is configured, or a named run is missing or too short.
    """
    if not cfg.tasks:
        raise ConfigError("tasks=[] is empty. Name at least one environment.")
    measured = load_measured(Path(cfg.simulator.compare)) if cfg.simulator.compare else None
    workload: Workload = SampledWorkload(cfg.simulator, unit=cfg.horizon.unit)
    if cfg.simulator.from_run:
        workload = load_workload(Path(cfg.simulator.from_run), cfg.algorithm)
    requested = cfg.simulator.mode or cfg.train.mode.value
    modes = [TrainMode.ASYNC, TrainMode.SYNC] if requested == BOTH else [TrainMode(requested)]
    configs = [replace(cfg, train=replace(cfg.train, mode=mode)) for mode in modes]
    with quiet_scheduler():
        predictions = [SimulatedRun(each, workload).run() for each in configs]
        out.write(format_predictions(predictions))
        ratio = None
        if len(predictions) > 1:
            ratio = predictions[0].trained_per_h / max(predictions[1].trained_per_h, 1e-9)
            out.write(f"\nasync trains {ratio:.2f} x as many episodes per hour as sync\n")
        compared = compare(predictions[0], measured) if measured else []
        if compared:
            out.write("\n" + format_comparison(compared))
        is_searched = cfg.simulator.search and predictions[0].mode == TrainMode.ASYNC
        advice = advise(configs[0], workload) if is_searched else None
        if advice is not None:
            out.write("\n" + format_advice(advice))
    path = Path(cfg.simulator.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    findings = {
        "settings": asdict(cfg.simulator),
        "predictions": [each.to_json() for each in predictions],
        "async_over_sync": ratio,
        "comparison": [each.to_json() for each in compared],
        "advice": None if advice is None else asdict(advice),
    }
    write_json(path, findings)
    out.write(f"\nwritten: {path}\n")
    return 1 if any(each.stopped_by for each in predictions) else 0


@contextmanager
def quiet_scheduler() -> Iterator[None]:
    """Suppress the scheduler's warnings, because they concern simulated actors."""
    logger = logging.getLogger("scheduler")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
