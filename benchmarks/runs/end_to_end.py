"""The suite `end2end`: asynchronous against synchronous training, same settings."""

import tempfile
from collections import defaultdict
from pathlib import Path

from benchmarks.runs.real_run import TRAINING_ALONE, read_lines, train
from benchmarks.table import BenchTable
from common.config.run_config import TrainMode

RUN_S = 900.0  # Limit of one run, with its start.
NUM_ROUNDS = 2  # Rounds of both modes, in turn.
# Earlier steps wait for engines and for the choice of kernels.
FIRST_STEP = 6
LAST_STEP = 20
MIN_RATIO = 1.6
SETTINGS = (*TRAINING_ALONE, f"train.num_steps={LAST_STEP}")


def run_suite(table: BenchTable) -> None:
    """Train the quickstart in both modes, twice each, in four minutes."""
    table.title(f"quickstart, steps {FIRST_STEP} to {LAST_STEP}, {NUM_ROUNDS} runs of each mode")
    with tempfile.TemporaryDirectory(prefix="longstride-end2end-") as folder:
        table.attempt("async over sync", lambda: add_runs(table, Path(folder)))


def add_runs(table: BenchTable, folder: Path) -> None:
    arrived: defaultdict[TrainMode, float] = defaultdict(float)
    took_s: defaultdict[TrainMode, float] = defaultdict(float)
    for number in range(NUM_ROUNDS):
        for mode in (TrainMode.SYNC, TrainMode.ASYNC):
            name = f"{mode.value}-{number}"
            overrides = (*SETTINGS, f"train.mode={mode.value}", f"run.seed={number}")
            train(name, overrides, folder=folder, timeout_s=RUN_S)
            num_episodes, seconds = window(folder / name / "metrics.jsonl")
            arrived[mode] += num_episodes
            took_s[mode] += seconds
    # Both modes train the same number of episodes per step. Arrivals vary over time and include
    # episodes without signal.
    num_steps = dict.fromkeys(arrived, NUM_ROUNDS * (LAST_STEP - FIRST_STEP))
    for what, num, bound in (("steps", num_steps, MIN_RATIO), ("episodes arrived", arrived, None)):
        sync, asynchronous = (
            num[mode] / took_s[mode] for mode in (TrainMode.SYNC, TrainMode.ASYNC)
        )
        name = f"{what} per second, asynchronous"
        table.compare(name, asynchronous, sync, "/s", against="synchronous", at_least=bound)


def window(metrics: Path) -> tuple[float, float]:
    """Return the episodes that arrived between the first and the last step, and the seconds."""
    steps = {line["step"]: line for line in read_lines(metrics) if "wait/batch_s" in line}
    later = range(FIRST_STEP + 1, LAST_STEP + 1)
    took_s = steps[LAST_STEP]["time_s"] - steps[FIRST_STEP]["time_s"]
    return sum(steps[step]["episodes/arrived"] for step in later), took_s
