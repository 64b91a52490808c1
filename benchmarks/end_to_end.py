"""The suites `end2end` and `tail`: asynchronous against synchronous training, same settings."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path

from benchmarks.real_run import TRAINING_ALONE, read_lines, train
from benchmarks.suite import Suite
from common.config.train import TrainMode

RUN_S = 1800.0  # Limit of one run, with its start.
MIN_RATIO = 1.6
# Earlier steps wait for engines and for the choice of kernels.
FIRST_STEP = 6
LAST_STEP = 20
NUM_ROUNDS = 2  # Rounds of both modes, in turn.
MODES = (TrainMode.SYNC, TrainMode.ASYNC)
# Episodes of 4 turns, each of 0.3 s, log-normal with sigma 0.4; one in 50 takes 10 times as long.
TIMES = 'median_s: "0.3", sigma: "0.4", num_turns: "4", tail_frac: "0.02", tail_factor: "10"'
LONG_TAIL = (
    'envhub.envs=["benchmarks.envhub.slow:make_spec"]',
    "tasks=[{env: slow, subset: wait}]",
    f"envs.plugins={{{TIMES}}}",
    "horizon.kind=fixed",
    "horizon.stages=[4]",
    "groups.size=4",
    "scheduler.max_ahead_steps=3",
    "learner.max_lag_steps=8",
    "learner.checkpoint_every_steps=1000",
    "learner.lr=1e-7",  # The environment is not learnable.
    "learner.muon_lr=1e-7",
    "actor.max_turn_tokens=4",
)


def run_suite(suite: Suite) -> None:
    """Train the quickstart in both modes, twice each, in four minutes."""
    suite.title(f"quickstart, steps {FIRST_STEP} to {LAST_STEP}, {NUM_ROUNDS} runs of each mode")
    add_modes(suite, num_rounds=NUM_ROUNDS)


def run_tail(suite: Suite) -> None:
    """Train both modes once with an environment whose episodes have a long tail of durations."""
    suite.title(f"slow environment, steps {FIRST_STEP} to {LAST_STEP}; one episode in 50 is long")
    add_modes(suite, num_rounds=1, settings=LONG_TAIL)


def add_modes(suite: Suite, *, num_rounds: int, settings: Sequence[str] = ()) -> None:
    """Train in both modes in turn, and compare their steps per second."""
    with suite.check("async over sync") as folder:

        def train_once(mode: TrainMode, seeds: Iterator[int]) -> float:
            """Return the seconds of the measured steps of a run with the next seed."""
            seed = next(seeds)
            name = f"{mode.value}-{seed}"
            of_run = (
                f"train.num_steps={LAST_STEP}",
                f"train.mode={mode.value}",
                f"run.seed={seed}",
            )
            overrides = (*TRAINING_ALONE, *settings, *of_run)
            train(name, overrides, folder=folder, timeout_s=RUN_S)
            return window_s(folder / name / "metrics.jsonl")

        took_s = suite.in_turn(
            {mode: partial(train_once, mode, count()) for mode in MODES}, num_rounds=num_rounds
        )
        num_steps = num_rounds * (LAST_STEP - FIRST_STEP)
        sync, asynchronous = (num_steps / sum(seconds) for seconds in took_s.values())
        name = "steps per second, asynchronous"
        suite.compare(name, asynchronous, sync, "/s", against="synchronous", at_least=MIN_RATIO)


def window_s(metrics: Path) -> float:
    """Return the seconds between the first and the last measured step of a run."""
    ends = {line["step"]: line["time_s"] for line in read_lines(metrics) if "wait/batch_s" in line}
    return ends[LAST_STEP] - ends[FIRST_STEP]
