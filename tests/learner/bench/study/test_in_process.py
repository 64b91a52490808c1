"""Laws of a run in one process: exact lag, fresh data after a skipped batch, repeatable."""

import copy
from typing import Any

import pytest

from actor.bench.in_process import InProcessPlayer
from common.config.load import load_config
from common.config.run_config import RunConfig
from common.repository import ROOT
from envhub.catalogue.registry import Registry
from learner.batch.credit import samples_of
from learner.bench.study.in_process import InProcessRun
from learner.bench.study.outcome import Outcome
from learner.bench.study.plan import merged, read_study
from learner.policy.forward import Networks
from learner.training.ranks import Ranks
from learner.training.step import Gradients, TrainerSettings

pytestmark = pytest.mark.slow  # torch takes seconds to import, and it samples

SMALL = (
    *("train.num_steps=3", "groups.per_step=2", "groups.size=4", "eval.num_items=8"),
    *("horizon.kind=fixed", "horizon.stages=[3]", "learner.max_lag_steps=8"),
)


def make_playing(cfg: RunConfig) -> tuple[InProcessPlayer, dict[str, Any]]:
    registry = Registry(["babyai"], cfg.envs, cfg.env)
    return InProcessPlayer(cfg, {"babyai": registry.spec("babyai")}), registry.catalogue()


def made(*overrides: str) -> tuple[Outcome, bool, InProcessRun]:
    cfg = load_config("quickstart", merged(SMALL, overrides), root=ROOT)
    run = InProcessRun(cfg, make_playing)
    return *run.run(arm="a"), run


def test_same_seed_makes_the_same_run_and_lag_is_as_told() -> None:
    lagging = ("learner.hold_back_steps=2", "scheduler.max_ahead_steps=2")
    first, _, _ = made(*lagging)
    again, _, _ = made(*lagging)
    assert (first.after, first.trained) == (again.after, again.trained)
    assert (first.ess_min, first.lag_mean) == (again.ess_min, again.lag_mean)
    assert 0.5 < first.lag_mean < 1.5  # 0, 1, 2 steps


def test_batch_after_a_skipped_one_is_fresh() -> None:
    outcome, has_acted, run = made(
        *("learner.hold_back_steps=2", "scheduler.max_ahead_steps=2"),
        *("learner.lr=0.01", "learner.muon_lr=0.03", "train.num_steps=4"),
        *("learner.controller.ess_skip=0.85", "learner.controller.ess_gate=0.85"),
    )
    assert has_acted
    assert outcome.num_skipped > 0
    assert run.trainer.max_ahead_steps == 0  # the gate closed, so the lag is 0 from there on


def test_at_lag_zero_every_correction_of_one_update_has_the_same_gradient() -> None:
    study = read_study("staleness")
    arms = {arm.name: arm for arm in study.arms}
    start = InProcessRun(load_config("quickstart", SMALL, root=ROOT), make_playing)
    groups = start.play(2, version=0, weights=start.weights())
    gradients: dict[str, Any] = {}
    for kind in ("none", "default", "interpolated", "m2po", "per-turn"):
        told = [each for each in arms[f"1x-lag1-{kind}-on"].overrides if "algorithm." in each]
        cfg = load_config("quickstart", merged(SMALL, told), root=ROOT)
        settings = TrainerSettings(
            learner=cfg.learner, algorithm=cfg.algorithm, num_steps=1, engine_dtype="float32"
        )
        policy = copy.deepcopy(start.model)
        gradient = Gradients(settings, Networks(policy=policy), Ranks())
        batch = gradient.prepare(samples_of(groups, cfg.algorithm), 0)
        gradient.accumulate(batch, range(len(batch.samples)))
        gradients[kind] = {n: p.grad for n, p in policy.named_parameters()}
    for kind, own in gradients.items():
        total = sum(each.square().sum() for each in gradients["default"].values())
        apart = sum((own[n] - each).square().sum() for n, each in gradients["default"].items())
        assert apart < 1e-3 * total, (
            kind
        )  # arithmetic of engine and learner differs in the third digit
