"""Laws of a run in one process: exact lag, fresh data after a skipped batch, repeatable."""

import copy
from typing import Any

import pytest

from benchmarks.study.command import make_playing
from benchmarks.study.in_process import InProcessRun
from benchmarks.study.outcome import SeedResult, by_distance
from benchmarks.study.plan import merged, read_study
from common.config.load import load_config
from common.repository import ROOT
from learner.batch.credit import samples_of
from learner.policy.forward import Networks
from learner.training.ranks import Ranks
from learner.training.step import Gradients, TrainerSettings

pytestmark = [pytest.mark.slow, pytest.mark.long]

SMALL = (
    "model.path=configs/policies/tiny",
    *("train.num_steps=3", "groups.per_step=2", "groups.size=4", "eval.num_items=8"),
    *("horizon.kind=fixed", "horizon.stages=[3]", "learner.max_lag_steps=8"),
)


ROOMS = (
    *("tasks=[{env: rooms, subset: Carry, distance: [1, 32]}]", "actor.max_model_len=2048"),
    *("eval.num_items=4", "groups.size=2", "groups.min_size=2"),
)


def made(*overrides: str) -> tuple[SeedResult, bool, InProcessRun]:
    cfg = load_config("quickstart", merged(SMALL, overrides), root=ROOT)
    run = InProcessRun(cfg, make_playing)
    return *run.run(arm="a"), run


def test_same_seed_gives_the_same_run_and_lag() -> None:
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


def test_gate_closes_only_where_the_sampler_clip_binds() -> None:
    told = (
        *("learner.hold_back_steps=2", "scheduler.max_ahead_steps=2", "train.num_steps=4"),
        *("learner.lr=0.01", "learner.muon_lr=0.03", "learner.controller.clip_gate=0"),
        *("learner.controller.ess_skip=0", "learner.controller.ess_gate=0"),
    )
    _, has_acted, run = made(*told)
    assert has_acted
    assert run.trainer.max_ahead_steps < 2
    _, _, run = made(*told, "algorithm.proximal=recomputed", "learner.num_minibatches=2")
    assert run.trainer.max_ahead_steps == 2


def test_run_is_evaluated_with_its_spending() -> None:
    outcome, _, _ = made("eval.every_steps=2", "algorithm.filter_zero_variance=false")
    assert [point.step for point in outcome.points] == [0, 2, 3]
    assert [point.num_episodes for point in outcome.points] == [0, 16, 24]
    spent = [point.spent_s for point in outcome.points]
    assert spent[0] == 0 < spent[1] < spent[2] < outcome.cpu_s
    assert (outcome.before, outcome.after) == (
        outcome.points[0].success,
        outcome.points[-1].success,
    )
    assert outcome.points[1].num_tokens > 16


def test_gate_decides_on_episodes_of_run() -> None:
    _, _, run = made(
        *("horizon.kind=gated", "horizon.stages=[1,3]", "horizon.gated.window_steps=2"),
        *("horizon.gated.min_steps=2", "horizon.gated.max_gain=1", "eval.before=false"),
        "horizon.gated.min_truncated_frac=0.3",  # a single turn solves few of the items
    )
    gate = run.curriculum.gated["babyai"]
    (move,) = gate.moves
    assert (move.version, move.from_stage, move.to_stage) == (2, 0, 1)
    assert 0.3 <= move.truncated_frac < 1
    assert all(step.num_episodes and 0 < step.ess_frac <= 1 for step in gate.steps)


def test_distance_grows_with_steps_and_evaluation_covers_all() -> None:
    distances = ("curriculum.kind=distance", "curriculum.distance.every_steps=1")
    cfg = load_config("quickstart", merged(SMALL, (*ROOMS, *distances)), root=ROOT)
    run = InProcessRun(cfg, make_playing)
    weights = run.weights()
    for version, most in ((0, 4), (1, 8), (4, 32)):
        groups = run.play(4, version=version, weights=weights)
        assert {each.members[0].item_id.partition("-")[0] for each in groups} == {
            f"Carry@1..{most}"
        }
        assert all(each.num_turns <= 2 * most for group in groups for each in group.members)
    assert by_distance(run.evaluate(weights)) == ((1, 0), (1, 0), (1, 0), (1, 0))


def test_corrections_at_lag_zero_have_the_same_gradient() -> None:
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
