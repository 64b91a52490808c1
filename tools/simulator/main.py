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
from tools.simulator.workload import (
    MeasuredPace,
    SampledWorkload,
    Workload,
    at_longest_horizon,
    load_measured,
    load_workload,
    num_engines,
    with_actors,
    with_ahead,
    with_size,
)
from tools.simulator.world import Prediction, SimulatedRun

AHEAD_STEPS = (1, 2, 4, 8)
ACTOR_FACTORS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4)
GROUP_SIZES = (4, 8, 16)
ENOUGH_FRAC = 0.95  # Fraction of the best rate that is sufficient.
KEPT_FRAC = 0.99  # Fraction of the episodes that the bound on lag must accept.
MAX_EPISODES = 40_000  # Limit of one trial.
MAX_HOURS = 48.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One simulated value of a setting, with its figures."""

    value: int
    trained_per_h: float
    lag_mean: float
    actor_idle_frac: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The recommended settings and all trials. Settings that were not varied are the run's."""

    max_ahead_steps: int
    max_lag_steps: int
    num_actors: int
    group_size: int
    groups_per_step: int
    ahead_trials: list[Trial]
    actor_trials: list[Trial]
    size_trials: list[Trial]


def advise(cfg: SimulatorConfig, workload: Workload) -> Recommendation:
    """Return the cheapest setting that trains nearly as much as the best, one axis at a time.

    The first axis is the lookahead, with a lag bound so high that few episodes are discarded. The
    recommended lag bound accepts 99 % of these episodes. Then the search tries fewer actors, and
    then other group sizes, which it takes if they train more. All trials use the longest horizon,
    because a long run spends most of its time there.
    """
    cfg = at_longest_horizon(cfg)
    num_actors = num_engines(cfg)
    ahead: dict[int, Prediction] = {}
    for value in sorted({*AHEAD_STEPS, max(1, cfg.scheduler.max_ahead_steps)}):
        ahead[value] = _predict(with_ahead(cfg, value, max_lag_steps=4 * value + 8), workload)
    best_ahead = _smallest_sufficient(ahead)
    max_lag_steps = _lag_bound(ahead[best_ahead])
    cfg = with_ahead(cfg, best_ahead, max_lag_steps=max_lag_steps)
    actors = {
        value: _predict(with_actors(cfg, value), workload)
        for value in sorted({max(1, round(num_actors * factor)) for factor in ACTOR_FACTORS})
    }
    best_actors = _smallest_sufficient(actors)
    cfg = with_actors(cfg, best_actors)
    sizes = {
        value: _predict(with_size(cfg, value), workload)
        for value in sorted({*GROUP_SIZES, cfg.groups.size})
        if cfg.groups.size * cfg.groups.per_step % value == 0
    }
    best_size = max(sizes, key=lambda size: sizes[size].trained_per_h)
    if sizes[cfg.groups.size].trained_per_h >= ENOUGH_FRAC * sizes[best_size].trained_per_h:
        best_size = cfg.groups.size
    return Recommendation(
        max_ahead_steps=best_ahead,
        max_lag_steps=max_lag_steps,
        num_actors=best_actors,
        group_size=best_size,
        groups_per_step=with_size(cfg, best_size).groups.per_step,
        ahead_trials=_trials(ahead),
        actor_trials=_trials(actors),
        size_trials=_trials(sizes),
    )


def _predict(cfg: SimulatorConfig, workload: Workload) -> Prediction:
    """Return the prediction for a configuration."""
    num = min(MAX_EPISODES, cfg.simulator.max_episodes)
    cfg = replace(cfg, simulator=replace(cfg.simulator, hours=MAX_HOURS, max_episodes=num))
    return SimulatedRun(cfg, workload, max_steps=cfg.simulator.search_steps).run()


def _smallest_sufficient(predictions: dict[int, Prediction]) -> int:
    """Return the smallest value whose training rate is close to the best."""
    best = max(each.trained_per_h for each in predictions.values())
    enough = [v for v, each in predictions.items() if each.trained_per_h >= ENOUGH_FRAC * best]
    return min(enough)


def _lag_bound(prediction: Prediction) -> int:
    """Return the lag that most consumed episodes do not exceed."""
    total = sum(prediction.lag_counts.values())
    passed = 0
    for lag, num in sorted(prediction.lag_counts.items()):
        passed += num
        if passed >= KEPT_FRAC * total:
            return max(1, lag)
    return 1


def _trials(predictions: dict[int, Prediction]) -> list[Trial]:
    """Return the predictions as trials, by the value of the setting."""
    return [
        Trial(
            value=value,
            trained_per_h=prediction.trained_per_h,
            lag_mean=prediction.lag_mean,
            actor_idle_frac=prediction.actor_idle_frac,
        )
        for value, prediction in predictions.items()
    ]


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
