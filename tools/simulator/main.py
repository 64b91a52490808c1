"""The command `simulate`: predict a run, compare it with a measured one, recommend settings."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TextIO

from common.config.run_config import RunConfig
from common.config.train import TrainMode
from common.errors import ConfigError
from common.store.run_dir import write_json
from tools.simulator.measured import load_measured, load_workload
from tools.simulator.report import compare, format_advice, format_comparison, format_predictions
from tools.simulator.search import advise
from tools.simulator.workload import SampledWorkload, Workload
from tools.simulator.world import SimulatedRun

BOTH = "both"


def run(cfg: RunConfig, out: TextIO) -> int:
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
