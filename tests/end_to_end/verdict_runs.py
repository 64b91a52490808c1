"""Runs that check the verdict on a bottleneck, and the effect of its advice.

Four runs with every role are each slowed down in one place by settings alone. Each is then repeated
with the first setting that its verdict recommends. `simulate` predicts the second run from the
episodes of the first.
"""

from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.real_run import TRAINING_ALONE, train
from common.config.load import load_config
from common.store.run_dir import RunDir
from learner.journal.metrics import read_metrics
from tools.dashboard.reading.sources import open_source
from tools.dashboard.verdict import Bottleneck, ThroughputVerdict
from tools.simulator.config import SimulatorConfig
from tools.simulator.main import quiet_scheduler
from tools.simulator.workload import load_workload
from tools.simulator.world import SimulatedRun

RUN_S = 400.0  # Limit of one run, with its start.
FIRST_STEP = 3  # Earlier steps wait for the engine.
MIN_RATIO = 1.1  # Ratio of episodes per second, after the advice over before.
NOT_SIMULATED = ("learner.ppo_epochs", "learner.num_minibatches", "learner.num_ranks")
SETTINGS = {
    "envhub.envs": '["benchmarks.envhub.slow:make_spec"]',
    "tasks": "[{env: slow, subset: wait}]",
    "horizon.stages": "[64]",
    "groups.per_step": "2",
    "actor.max_turn_tokens": "4",
    "scheduler.max_ahead_steps": "3",
    "learner.max_lag_steps": "8",
    "learner.lr": "1e-7",  # The environment is not learnable.
    "learner.muon_lr": "1e-7",
    "learner.checkpoint_every_steps": "1000",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run that is slow in one place."""

    turn_s: float  # Turn time of the environment.
    settings: dict[str, str]
    bound: Bottleneck


CASES = {
    "slow environment": Case(
        turn_s=0.8, settings={"actor.max_concurrent": "6"}, bound=Bottleneck.ENVIRONMENT
    ),
    "slow engine": Case(
        turn_s=0.001,
        settings={"actor.max_concurrent": "1", "actor.max_turn_tokens": "32"},
        bound=Bottleneck.ENGINE,
    ),
    "slow learner": Case(
        turn_s=0.05,
        settings={"learner.ppo_epochs": "16", "learner.num_minibatches": "2"},
        bound=Bottleneck.LEARNER,
    ),
    "gate too tight": Case(
        turn_s=0.4,
        settings={"scheduler.max_ahead_steps": "0", "learner.ppo_epochs": "12"},
        bound=Bottleneck.GATE,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceEffect:
    """The verdict of a staged run, and the effect of its advice."""

    verdict: ThroughputVerdict
    before_per_s: float  # Trained episodes per second.
    after_per_s: float
    simulated: float | None  # Ratio predicted by `simulate`; None: it does not model this setting.


def stage(name: str, case: Case, *, folder: Path, num_steps: int) -> AdviceEffect:
    """Run a case, then again with the first setting that its verdict recommends."""
    word = name.replace(" ", "-")
    plugins = f'{{median_s: "{case.turn_s}", sigma: "0.2", num_turns: "3", tail_frac: "0"}}'
    settings = {**SETTINGS, **case.settings, "envs.plugins": plugins}
    settings["train.num_steps"] = str(num_steps)
    verdict = _run(word, settings, folder)
    assert verdict.advice, verdict.sentence
    key, _, value = verdict.advice[0].knob.partition("=")
    _run(f"{word}-advised", {**settings, key: value}, folder)
    before, after = (rate(folder / each) for each in (word, f"{word}-advised"))
    simulated = None
    if key not in NOT_SIMULATED:
        pair = [
            _simulated(folder / word, f"{k}={v}") for k, v in ((key, settings[key]), (key, value))
        ]
        simulated = pair[1] / pair[0]
    return AdviceEffect(
        verdict=verdict, before_per_s=before, after_per_s=after, simulated=simulated
    )


def _run(name: str, settings: dict[str, str], folder: Path) -> ThroughputVerdict:
    overrides = (*TRAINING_ALONE, *(f"{key}={value}" for key, value in settings.items()))
    train(name, overrides, folder=folder, timeout_s=RUN_S, config="smoke")
    source = open_source(str(folder / name), runs=folder)
    source.refresh()
    return source.verdict()  # type: ignore[union-attr]


def rate(root: Path) -> float:
    """Return the trained episodes per second of a run, without its first steps."""
    config = yaml.safe_load(RunDir(root=root).config.read_text(encoding="utf-8"))
    lines = read_metrics(RunDir(root=root).metrics)[FIRST_STEP:]
    steps = (lines[-1]["step"] or 0) - (lines[0]["step"] or 0)
    seconds = (lines[-1]["time_s"] or 0.0) - (lines[0]["time_s"] or 0.0)
    groups = config["groups"]
    return steps * groups["per_step"] * groups["size"] / seconds


def _simulated(root: Path, *overrides: str) -> float:
    """Return the episodes per second that `simulate` predicts from a run with a changed setting."""
    cfg = load_config(str(RunDir(root=root).config), overrides, schema=SimulatorConfig)
    with quiet_scheduler():
        return SimulatedRun(cfg, load_workload(root, cfg.algorithm)).run().trained_per_h / 3600.0
