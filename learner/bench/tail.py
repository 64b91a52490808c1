"""The suite of the long tail: how much faster async is than sync when some episodes are slow."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import yaml

from common.config.load import load_config
from common.config.run_config import TrainMode
from common.report.bench_table import BenchTable, Figure, Law
from common.repository import ROOT
from learner.bench.real_run import train
from learner.simulator.main import quiet_scheduler
from learner.simulator.tally import Prediction
from learner.simulator.workload import SampledWorkload
from learner.simulator.world import World

RUN_S = 1800.0  # for one run, its start included
NUM_STEPS = 14
GROUP_SIZE = 4
WARM_UP_STEPS = 2  # that wait for engines and first episodes
MIN_SIMULATED_RATIO = 2.0
MIN_RUN_RATIO = 1.6

_WRITTEN: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("tail.yaml").read_text())
BASE: list[str] = [*_WRITTEN["base"], f"groups.size={GROUP_SIZE}", f"train.num_steps={NUM_STEPS}"]
SLOW_ENV: list[str] = _WRITTEN["slow_env"]


def run_suite(out: TextIO) -> int:
    """Compare both modes in about four minutes; return 1 when a promise is not kept."""
    table = BenchTable(out=out)
    out.write(_WRITTEN["legend"])
    table.attempt("async over sync in the simulator", lambda: add_simulated(table))
    with tempfile.TemporaryDirectory(prefix="longstride-tail-") as folder:
        table.attempt("async over sync in real runs", lambda: add_runs(table, Path(folder)))
    return table.finish()


def add_simulated(table: BenchTable) -> None:
    modes = [TrainMode.ASYNC, TrainMode.SYNC]
    with quiet_scheduler():
        predictions = [predict(mode) for mode in modes]
    ratio = predictions[0].trained_per_h / predictions[1].trained_per_h
    table.add(
        _figure(
            "in the simulator", ratio, MIN_SIMULATED_RATIO, [p.trained_per_h for p in predictions]
        )
    )


def predict(mode: TrainMode) -> Prediction:
    cfg = load_config("quickstart", [*BASE, *_WRITTEN["same_in_simulator"]], root=ROOT)
    cfg = replace(cfg, train=replace(cfg.train, mode=mode))
    return World(cfg, SampledWorkload(cfg.simulator)).run()


def add_runs(table: BenchTable, folder: Path) -> None:
    rates = [trained_per_h(run(mode, folder)) for mode in (TrainMode.ASYNC, TrainMode.SYNC)]
    table.add(_figure("in real runs", rates[0] / rates[1], MIN_RUN_RATIO, rates))


def _figure(where: str, ratio: float, bound: float, per_h: list[float]) -> Figure:
    note = f"{per_h[0]:.0f} and {per_h[1]:.0f} trained episodes per hour"
    name = f"async over sync, {where}"
    return Figure(name=name, value=ratio, unit="", law=Law.AT_LEAST, bound=bound, note=note)


def run(mode: TrainMode, folder: Path) -> Path:
    """Train with the environment that waits; return the run's directory.

    Raises: LongstrideError: the run failed; holds its last words.
    """
    own = (f"run.dir={folder}", f"run.name={mode.value}", f"train.mode={mode.value}")
    log = folder / f"{mode.value}.log"
    overrides = [*own, *BASE, *SLOW_ENV]
    train(mode.value, overrides, config="quickstart", log=log, timeout_s=RUN_S)
    return folder / mode.value


def trained_per_h(run_dir: Path) -> float:
    """Return the episodes that a run trained per hour, its first steps left out."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "wait/batch_s" in line]
    before, later = steps[WARM_UP_STEPS - 1], steps[WARM_UP_STEPS:]
    num_groups = sum(line["groups/trained"] for line in later)
    return 3600.0 * GROUP_SIZE * num_groups / (later[-1]["time_s"] - before["time_s"])
