"""The suite of the long tail: how much faster async is than sync when some episodes are slow."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TextIO

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
NUM_TURNS, TURN_S, SIGMA, TAIL_FRAC, TAIL_FACTOR = 4, 0.3, 0.4, 0.02, 10.0

BASE = (
    "log.live=false",
    "log.wandb=disabled",
    f"groups.size={GROUP_SIZE}",
    "groups.per_step=8",
    "scheduler.max_ahead_steps=3",
    "learner.max_lag_steps=8",
    "horizon.kind=fixed",
    f"horizon.stages=[{NUM_TURNS}]",
    "eval.before=false",
    "eval.after=false",
    f"train.num_steps={NUM_STEPS}",
    "actor.max_concurrent=128",
    "actor.max_turn_tokens=4",
    "actor.start_timeout_s=900",  # of a busy machine
)
SLOW_ENV = (
    'envhub.envs=["envhub.bench.slow:make_spec"]',
    "tasks=[{env: slow, subset: wait}]",
    f'envs.plugins={{median_s: "{TURN_S}", sigma: "{SIGMA}", num_turns: "{NUM_TURNS}",'
    f' tail_frac: "{TAIL_FRAC}", tail_factor: "{TAIL_FACTOR:g}"}}',
    "learner.checkpoint_every_steps=1000",
    "learner.lr=1e-7",  # nobody can learn anything here, and what is learnt would only disturb
    "learner.muon_lr=1e-7",
)
SAME_IN_SIMULATOR = (
    "simulator.hours=0.25",
    f"simulator.turn_s={TURN_S}",
    "simulator.env_s=0",
    f"simulator.turn_sigma={SIGMA}",
    f"simulator.num_turns={NUM_TURNS}",
    "simulator.num_turns_sigma=0",
    f"simulator.tail_frac={TAIL_FRAC}",
    f"simulator.tail_factor={TAIL_FACTOR:g}",
    "simulator.step_s=0.2",
    "simulator.turn_tokens=20",
)
LEGEND = (
    f"Episodes of {NUM_TURNS} turns, each of {TURN_S:g} s, log-normal with sigma {SIGMA:g}.\n"
    f"One in {1 / TAIL_FRAC:.0f} takes {TAIL_FACTOR:g} times as long. A real run's environment\n"
    "waits in every step, by item and seed, so that both modes wait alike.\n"
)


def run_suite(out: TextIO) -> int:
    """Compare both modes in the simulator and in real runs; return 1 when a promise is not kept.

    Takes about four minutes, most of them waiting.
    """
    table = BenchTable(out=out)
    out.write(LEGEND)
    table.attempt("async over sync in the simulator", lambda: add_simulated(table))
    with tempfile.TemporaryDirectory(prefix="longstride-tail-") as folder:
        table.attempt("async over sync in real runs", lambda: add_runs(table, Path(folder)))
    return table.finish()


def add_simulated(table: BenchTable) -> None:
    """Simulate both modes and write their ratio."""
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
    """Return what the simulator says of a mode."""
    cfg = load_config("quickstart", [*BASE, *SAME_IN_SIMULATOR], root=ROOT)
    cfg = replace(cfg, train=replace(cfg.train, mode=mode))
    return World(cfg, SampledWorkload(cfg.simulator)).run()


def add_runs(table: BenchTable, folder: Path) -> None:
    """Run both modes for real and write their ratio."""
    rates = [trained_per_h(run(mode, folder)) for mode in (TrainMode.ASYNC, TrainMode.SYNC)]
    table.add(_figure("in real runs", rates[0] / rates[1], MIN_RUN_RATIO, rates))


def _figure(where: str, ratio: float, bound: float, per_h: list[float]) -> Figure:
    note = f"{per_h[0]:.0f} and {per_h[1]:.0f} trained episodes per hour"
    name = f"async over sync, {where}"
    return Figure(name=name, value=ratio, unit="", law=Law.AT_LEAST, bound=bound, note=note)


def run(mode: TrainMode, folder: Path) -> Path:
    """Train with the environment that waits; return the run's directory.

    Raises:
        LongstrideError: the run failed; holds its last words.
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
