"""The suite `end2end`: asynchronous against synchronous training, same settings."""

import json
import tempfile
from pathlib import Path

from benchmarks.runs.real_run import TRAINING_ALONE, train
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
    done = {mode: [0.0, 0.0, 0.0] for mode in (TrainMode.SYNC, TrainMode.ASYNC)}
    for number in range(NUM_ROUNDS):
        for mode, totals in done.items():
            name = f"{mode.value}-{number}"
            overrides = (*SETTINGS, f"train.mode={mode.value}", f"run.seed={number}")
            train(name, overrides, folder=folder, timeout_s=RUN_S)
            arrived, took_s = window(folder / name / "metrics.jsonl")
            for index, value in enumerate((LAST_STEP - FIRST_STEP, arrived, took_s)):
                totals[index] += value
    sync, asynchronous = done.values()
    # Both modes train the same number of episodes per step. Arrivals vary over time and include
    # episodes without signal.
    table.compare(
        "steps per second, asynchronous",
        asynchronous[0] / asynchronous[2],
        sync[0] / sync[2],
        "/s",
        against="synchronous",
        at_least=MIN_RATIO,
    )
    table.compare(
        "episodes arrived per second, asynchronous",
        asynchronous[1] / asynchronous[2],
        sync[1] / sync[2],
        "/s",
        against="synchronous",
    )


def window(metrics: Path) -> tuple[float, float]:
    """Return the episodes that arrived between the first and the last step, and the seconds."""
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    steps = {line["step"]: line for line in lines if "wait/batch_s" in line}
    later = range(FIRST_STEP + 1, LAST_STEP + 1)
    took_s = steps[LAST_STEP]["time_s"] - steps[FIRST_STEP]["time_s"]
    return sum(steps[step]["episodes/arrived"] for step in later), took_s
