"""The suite `tail`: the speed-up of async over sync when some episodes are slow."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.runs.real_run import read_lines, train
from benchmarks.table import BenchTable
from common.config.load import load_config
from common.config.run_config import TrainMode
from common.repository import ROOT
from learner.simulator.main import quiet_scheduler
from learner.simulator.tally import Prediction
from learner.simulator.workload import SampledWorkload
from learner.simulator.world import SimulatedRun

RUN_S = 1800.0  # Limit of one run, with its start.
MODES = (TrainMode.ASYNC, TrainMode.SYNC)
NUM_STEPS = 14
GROUP_SIZE = 4
WARM_UP_STEPS = 2  # Steps that wait for engines and first episodes.
MIN_SIMULATED_RATIO = 2.0
MIN_RUN_RATIO = 1.6

_WRITTEN: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_name("tail.yaml").read_text(encoding="utf-8")
)
BASE: list[str] = [*_WRITTEN["base"], f"groups.size={GROUP_SIZE}", f"train.num_steps={NUM_STEPS}"]
SLOW_ENV: list[str] = _WRITTEN["slow_env"]


def run_suite(table: BenchTable) -> None:
    """Compare both modes in about four minutes."""
    table.title(_WRITTEN["legend"].rstrip())
    table.attempt("async over sync in the simulator", lambda: add_simulated(table))
    with tempfile.TemporaryDirectory(prefix="longstride-tail-") as folder:
        table.attempt("async over sync in real runs", lambda: add_runs(table, Path(folder)))


def add_simulated(table: BenchTable) -> None:
    with quiet_scheduler():
        predictions = [predict(mode) for mode in MODES]
    _add(table, "in the simulator", [p.trained_per_h for p in predictions], MIN_SIMULATED_RATIO)


def predict(mode: TrainMode) -> Prediction:
    cfg = load_config("quickstart", [*BASE, *_WRITTEN["same_in_simulator"]], root=ROOT)
    cfg = replace(cfg, train=replace(cfg.train, mode=mode))
    return SimulatedRun(cfg, SampledWorkload(cfg.simulator)).run()


def add_runs(table: BenchTable, folder: Path) -> None:
    """Train in both modes with the waiting environment."""
    for mode in MODES:
        overrides = [f"train.mode={mode.value}", *BASE, *SLOW_ENV]
        train(mode.value, overrides, folder=folder, timeout_s=RUN_S)
    rates = [trained_per_h(folder / mode.value) for mode in MODES]
    _add(table, "in real runs", rates, MIN_RUN_RATIO)


def _add(table: BenchTable, where: str, per_h: list[float], bound: float) -> None:
    note = f"{per_h[0]:.0f} and {per_h[1]:.0f} trained episodes per hour"
    table.at_least(f"async over sync, {where}", per_h[0] / per_h[1], "", bound, note)


def trained_per_h(run_dir: Path) -> float:
    """Return a run's trained episodes per hour, without its first steps."""
    steps = [line for line in read_lines(run_dir / "metrics.jsonl") if "wait/batch_s" in line]
    before = steps[WARM_UP_STEPS - 1]
    later = steps[WARM_UP_STEPS:]
    num_groups = sum(line["groups/trained"] for line in later)
    return 3600.0 * GROUP_SIZE * num_groups / (later[-1]["time_s"] - before["time_s"])
