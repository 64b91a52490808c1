"""Laws of a training step."""

import copy
import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from common.config.algorithm import AlgorithmSection, Correction
from common.config.learner import ControllerSection, LearnerSection, OptimizerKind, Precision
from common.errors import ConfigError
from learner.batch.batching import Sample
from learner.build import dump_batch
from learner.policy.finite import TrainingDiverged, WeightsNotFinite
from learner.policy.forward import Networks
from learner.training.step import TrainerSettings, offpolicy_metrics
from learner.training.trainer import Trainer
from tests.learner.builders import make_model, make_samples, make_trajectory

PASSIVE = ControllerSection(scale_lr=False, tighten_gate=False, skip_step=False)


def make_trainer(
    model=None, *, algorithm: AlgorithmSection | None = None, on_bad_batch=None, **settings
) -> Trainer:
    defaults = {"lr": 1e-2, "warmup_steps": 0, "precision": Precision.FP32, "controller": PASSIVE}
    cfg = LearnerSection(**{**defaults, **settings})
    settings = TrainerSettings(learner=cfg, algorithm=algorithm or AlgorithmSection(), num_steps=10)
    return Trainer(settings, Networks(policy=model or make_model()), on_bad_batch=on_bad_batch)


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    weights = trainer.tensors().items()
    return {name: t.detach().clone() for name, t in weights if name.startswith("model.")}


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max((one[name] - other[name]).abs().max().item() for name in one)


def on_policy(samples: list[Sample], model) -> list[Sample]:
    """Give samples the logprobs that the model itself assigns."""
    scores = make_trainer(copy.deepcopy(model)).score(
        [s.trajectory.token_ids.tolist() for s in samples]
    )
    result = []
    for sample, score in zip(samples, scores, strict=True):
        trajectory = sample.trajectory
        logprobs = np.where(trajectory.loss_mask, [0.0, *score], 0.0).astype(np.float32)
        result.append(
            Sample(trajectory=replace(trajectory, logprobs=logprobs), advantage=sample.advantage)
        )
    return result


def test_progress_is_reported_before_each_microbatch() -> None:
    calls: list[int] = []
    for budget in (10_000, 40):
        trainer = make_trainer(max_tokens_per_microbatch=budget)
        trainer.report_progress(partial(calls.append, budget))
        trainer.train_on(make_samples(), version=0)
    assert 0 < calls.count(10_000) < calls.count(40)


def poisoned(samples: list[Sample]) -> list[Sample]:
    trajectory = samples[0].trajectory
    logprobs = np.full_like(trajectory.logprobs, np.nan)
    bad = Sample(trajectory=replace(trajectory, logprobs=logprobs), advantage=1.0)
    return [bad, *samples[1:]]


@pytest.mark.parametrize("anchoring", [{}, {"ppo_epochs": 2}])
def test_microbatches_train_as_one_large_batch(anchoring: dict) -> None:
    results = []
    for budget in (12, 10_000):
        trainer = make_trainer(max_tokens_per_microbatch=budget, **anchoring)
        metrics = trainer.train_on(make_samples(), version=0).metrics
        results.append((metrics["loss/policy"], metrics["train/grad_norm"], weights_of(trainer)))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-6)
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-5)
    # Of a step of 1e-2: AdamW makes as much of the rounding of a gradient of nearly nothing.
    assert difference(results[0][2], results[1][2]) < 2e-4


def test_step_raises_good_tokens_and_lowers_bad_ones() -> None:
    model = make_model()
    samples = on_policy(
        [
            Sample(trajectory=make_trajectory([1, 2, 3], [0, 1, 1]), advantage=1.0),
            Sample(trajectory=make_trajectory([1, 7, 8], [0, 1, 1]), advantage=-1.0),
        ],
        model,
    )
    trainer = make_trainer(model, lr=1e-3)
    before = trainer.score([[1, 2, 3], [1, 7, 8]])
    trainer.train_on(samples, version=0)
    after = trainer.score([[1, 2, 3], [1, 7, 8]])
    assert sum(after[0]) > sum(before[0])
    assert sum(after[1]) < sum(before[1])


def test_correction_is_the_identity_on_policy() -> None:
    model = make_model()
    samples = on_policy(make_samples(), model)
    norms = []
    for correction in Correction:
        algorithm = AlgorithmSection(correction=correction)
        trainer = make_trainer(copy.deepcopy(model), algorithm=algorithm)
        metrics = trainer.train_on(samples, version=0).metrics
        norms.append(metrics["train/grad_norm"])
    assert norms == pytest.approx([norms[0]] * len(norms), rel=1e-5)
    assert metrics["offpolicy/ess_frac"] == pytest.approx(1.0)
    assert metrics["offpolicy/ratio_p99"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["policy/kl_sampler"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["policy/clipped_frac"] == 0.0
    assert metrics["offpolicy/noise_abs_logprob"] == pytest.approx(0.0, abs=1e-5)


def test_both_anchors_have_the_same_first_gradient_inside_bounds() -> None:
    # With ratios to mu inside the clip range, clipping at mu or weighting by prox/mu is the same.
    model = make_model()
    samples = on_policy(make_samples(num_groups=1), model)
    for sample in samples:
        sample.trajectory.logprobs[sample.trajectory.loss_mask] -= 0.1  # r = 1.105
    single = make_trainer(copy.deepcopy(model)).train_on(samples, version=0).metrics
    # Two epochs, but a rate so small that the second sees the same weights.
    twice = make_trainer(copy.deepcopy(model), ppo_epochs=2, lr=1e-12)
    double = twice.train_on(samples, version=0).metrics
    assert single["train/grad_norm"] == pytest.approx(double["train/grad_norm"], rel=1e-4)


def test_trust_region_binds_with_a_single_update() -> None:
    model = make_model()
    samples = on_policy(make_samples(), model)
    for sample in samples:  # the policy has moved as far as the advantage asks: r = e or 1/e
        trajectory = sample.trajectory
        trajectory.logprobs[trajectory.loss_mask] -= np.float32(sample.advantage)
    metrics = make_trainer(model).train_on(samples, version=0).metrics
    assert metrics["policy/clipped_frac"] == pytest.approx(1.0)
    assert metrics["train/grad_norm"] == 0.0


@pytest.mark.parametrize(
    ("ppo_epochs", "num_minibatches", "expected"), [(1, 1, 1), (1, 3, 3), (2, 1, 2), (2, 3, 6)]
)
def test_every_epoch_and_minibatch_is_an_update(
    ppo_epochs: int, num_minibatches: int, expected: int
) -> None:
    trainer = make_trainer(ppo_epochs=ppo_epochs, num_minibatches=num_minibatches)
    metrics = trainer.train_on(make_samples(), version=0).metrics
    assert metrics["train/num_updates"] == expected
    assert trainer.values()["num_updates"] == expected
    counted = {int(each) for name, each in trainer.tensors().items() if name.endswith(".step")}
    assert counted == {expected}


def test_non_finite_batch_changes_no_weight_and_is_counted() -> None:
    trainer = make_trainer()
    before = weights_of(trainer)
    metrics = trainer.train_on(poisoned(make_samples()), version=0).metrics
    assert difference(before, weights_of(trainer)) == 0.0
    assert metrics["train/num_bad_updates"] == 1.0
    assert "loss/policy" not in metrics
    assert all(np.isfinite(value) for value in metrics.values())


def test_non_finite_gradient_changes_no_weight_and_is_dumped(tmp_path: Path) -> None:
    model = make_model()
    trainer = make_trainer(
        model, on_bad_batch=lambda version, samples: dump_batch(tmp_path, version, samples)
    )
    before = weights_of(trainer)
    hook = model.lm_head.weight.register_hook(lambda gradient: gradient * torch.inf)
    metrics = trainer.train_on(make_samples(), version=4).metrics
    assert difference(before, weights_of(trainer)) == 0.0
    assert metrics["train/num_bad_updates"] == 1.0
    assert (tmp_path / "bad_batches" / "version-4" / "samples.jsonl").is_file()
    hook.remove()
    trainer.train_on(make_samples(), version=5)
    assert difference(before, weights_of(trainer)) > 0.0
    assert not (tmp_path / "bad_batches" / "version-5").exists()


def test_bad_minibatch_does_not_stop_the_good_one() -> None:
    trainer = make_trainer(num_minibatches=2)
    before = weights_of(trainer)
    metrics = trainer.train_on(poisoned(make_samples(num_groups=2)), version=0).metrics
    assert metrics["train/num_bad_updates"] == 1.0
    assert metrics["train/num_updates"] == 1.0
    after = weights_of(trainer)
    assert difference(before, after) > 0.0
    assert all(torch.isfinite(tensor).all() for tensor in after.values())


def test_only_consecutive_bad_steps_stop_training() -> None:
    trainer = make_trainer(max_bad_steps=2)
    good, bad = make_samples(), poisoned(make_samples())
    trainer.train_on(bad, version=0)
    trainer.train_on(good, version=1)
    trainer.train_on(bad, version=2)
    with pytest.raises(TrainingDiverged, match="2 consecutive steps up to version 3") as e:
        trainer.train_on(bad, version=3)
    assert isinstance(e.value, ConfigError)  # exit code 2: the supervisor does not try again


@pytest.mark.parametrize("settings", [{}, {"num_minibatches": 2}, {"ppo_epochs": 2}])
def test_nan_policy_ends_the_run_and_changes_no_weight(settings: dict) -> None:
    model = make_model()
    trainer = make_trainer(model, controller=ControllerSection(), **settings)
    trainer.train_on(on_policy(make_samples(), model), version=0)
    before = weights_of(trainer)
    hook = model.model.norm.register_forward_hook(lambda *given: given[2] * torch.nan)
    for version in (1, 2):
        result = trainer.train_on(make_samples(), version=version)
        assert not result.decision.is_skipped
        assert result.metrics["train/num_bad_updates"] >= 1.0
    with pytest.raises(TrainingDiverged, match="3 consecutive steps up to version 3"):
        trainer.train_on(make_samples(), version=3)
    hook.remove()
    assert difference(before, weights_of(trainer)) == 0.0


def test_skipped_batch_is_no_good_step() -> None:
    model = make_model()
    trainer = make_trainer(model, controller=ControllerSection(), max_bad_steps=2)
    trainer.train_on(poisoned(make_samples()), version=0)
    assert trainer.train_on(moved(make_samples(), model, 1.0), version=1).decision.is_skipped
    with pytest.raises(TrainingDiverged, match="2 consecutive steps"):
        trainer.train_on(poisoned(make_samples()), version=1)


def moved(samples: list[Sample], model, distance: float) -> list[Sample]:
    """Give samples logprobs from which the policy has moved away: all ratios are exp(-distance)."""
    samples = on_policy(samples, model)
    for sample in samples:
        sample.trajectory.logprobs[sample.trajectory.loss_mask] += np.float32(distance)
    return samples


def test_batch_of_a_uniformly_shifted_policy_is_skipped() -> None:
    model = make_model()
    trainer = make_trainer(model, controller=ControllerSection())
    result = trainer.train_on(moved(make_samples(), model, 1.0), version=0)
    assert result.decision.is_skipped
    assert result.metrics["offpolicy/ess_frac"] == pytest.approx(1.0, abs=1e-4)
    assert result.metrics["offpolicy/weight_mean"] == pytest.approx(np.exp(-1.0), rel=1e-4)


@pytest.mark.parametrize("settings", [{}, {"num_minibatches": 3}, {"ppo_epochs": 2}])
def test_logged_ess_equals_the_controllers(settings: dict) -> None:
    scaling = replace(PASSIVE, scale_lr=True, ess_target=1.0, min_lr_scale=1e-3)
    trainer = make_trainer(controller=scaling, **settings)
    metrics = trainer.train_on(make_samples(), version=0).metrics
    seen = [metrics["offpolicy/ess_frac"], metrics["offpolicy/weight_mean"]]
    assert metrics["controller/lr_scale"] == min(*seen, 1 / seen[1]) < 1.0


def test_token_with_zero_logprob_is_counted() -> None:
    samples = [Sample(trajectory=make_trajectory([1, 2, 3], [0, 1, 1]), advantage=1.0)]
    before, known = torch.tensor([0.0, -1.0]), torch.tensor([True, True])
    metrics = offpolicy_metrics(samples, before, known, 0)  # ratios e and 1
    assert metrics["offpolicy/num_same_version_tokens"] == 2.0
    assert metrics["offpolicy/ess_frac"] == pytest.approx((np.e + 1) ** 2 / (2 * (np.e**2 + 1)))
    unseen = offpolicy_metrics(samples, before, torch.tensor([False, True]), 0)
    assert unseen["offpolicy/num_same_version_tokens"] == 1.0


def test_lag_counts_versions_and_noise_needs_zero_lag() -> None:
    model = make_model()
    samples = [
        Sample(trajectory=make_trajectory([1, 2, 3], [0, 1, 1], version=5), advantage=1.0),
        Sample(trajectory=make_trajectory([4, 5, 6], [0, 0, 1], version=3), advantage=-1.0),
    ]
    samples = on_policy(samples, model)
    fresh = samples[0].trajectory
    fresh.logprobs[1:] += np.array([0.02, -0.04], dtype=np.float32)
    metrics = make_trainer(model).train_on(samples, version=5).metrics
    assert metrics["offpolicy/lag_mean"] == pytest.approx(2 / 3)
    assert metrics["offpolicy/lag_max"] == 2.0
    assert metrics["offpolicy/num_same_version_tokens"] == 2.0
    assert metrics["offpolicy/noise_abs_logprob"] == pytest.approx(0.03, abs=1e-5)
    assert metrics["train/num_tokens"] == 6.0
    assert metrics["train/num_sampled_tokens"] == 3.0


def test_noise_of_each_engine_is_told_apart_from_lag() -> None:
    """A bf16 engine has much noise, an fp32 engine little; one episode of the first is older."""
    plays = [("bf16", 5, [0.03, -0.05]), ("fp32", 5, [0.001, -0.003]), ("bf16", 4, [0.1, 0.2])]
    samples = []
    for member, (actor, version, noise) in enumerate(plays):
        play = make_trajectory([1, 2, 3], [0, 1, 1], version=version, member=member, actor=actor)
        logprobs = np.array([0.0, *(-1.0 - np.array(noise))], dtype=np.float32)
        samples.append(Sample(trajectory=replace(play, logprobs=logprobs), advantage=1.0))
    metrics = offpolicy_metrics(samples, torch.full((6,), -1.0), torch.ones(6).bool(), 5)
    name = "offpolicy/noise_abs_logprob"
    assert metrics[f"{name}/bf16"] == pytest.approx(0.04, rel=1e-4)
    assert metrics[f"{name}/fp32"] == pytest.approx(0.002, rel=1e-3)
    assert metrics["offpolicy/lag_abs_logprob/bf16"] == pytest.approx(0.15 - 0.04, rel=1e-4)
    assert "offpolicy/lag_abs_logprob/fp32" not in metrics
    weights = np.exp([0.03, -0.05, 0.1, 0.2])
    assert metrics["offpolicy/weight_mean/bf16"] == pytest.approx(weights.mean(), rel=1e-5)
    assert metrics["offpolicy/weight_mean/fp32"] == pytest.approx(1.0, abs=0.002)
    alone = offpolicy_metrics(samples[1:2], torch.full((2,), -1.0), torch.ones(2).bool(), 5)
    assert not any(key.endswith("/fp32") for key in alone)


def test_a_sample_without_sampled_tokens_adds_nothing() -> None:
    empty = Sample(trajectory=make_trajectory([1, 2, 3], [0, 0, 0], group_id="e"), advantage=9.0)
    results = []
    for extra in ([], [empty]):
        trainer = make_trainer()
        trainer.train_on([*make_samples(), *extra], version=0)
        results.append(weights_of(trainer))
    assert difference(*results) == 0.0
    with pytest.raises(ValueError, match="no sampled token"):
        make_trainer().train_on([empty], version=0)


def test_entropy_bonus_raises_the_entropy() -> None:
    samples = [Sample(trajectory=s.trajectory, advantage=0.0) for s in make_samples()]
    trainer = make_trainer(algorithm=AlgorithmSection(entropy_coef=1.0), lr=1e-3)
    entropies = [trainer.train_on(samples, version=v).metrics["policy/entropy"] for v in range(3)]
    assert entropies[0] < entropies[1] < entropies[2]


def test_scores_keep_their_order_and_match_the_model() -> None:
    model = make_model()
    trainer = make_trainer(model, max_tokens_per_microbatch=6)
    sequences = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10]]
    scores = trainer.score(sequences)
    assert [len(score) for score in scores] == [2, 1, 3, 0]
    with torch.no_grad():
        logprobs = model(input_ids=torch.tensor([[6, 7, 8, 9]])).logits[0].log_softmax(-1)
    expected = [logprobs[position, token].item() for position, token in enumerate((7, 8, 9))]
    assert scores[2] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("kind", list(OptimizerKind))
def test_restored_trainer_continues_bit_for_bit(kind: OptimizerKind, tmp_path: Path) -> None:
    settings = {"optimizer": kind, "num_minibatches": 2}
    trainer = make_trainer(**settings)
    trainer.train_on(make_samples(seed=1), version=0)
    trainer.save(tmp_path).result(60)
    values = json.loads(json.dumps(trainer.values()))
    restored = make_trainer(make_model(seed=9), **settings)
    restored.restore(tmp_path, values)
    for one in (trainer, restored):
        one.train_on(make_samples(num_groups=6, seed=2), version=1)
    assert difference(weights_of(trainer), weights_of(restored)) == 0.0
    assert restored.values()["num_updates"] == trainer.values()["num_updates"] == 4


@pytest.mark.parametrize(
    ("controller", "ahead", "after"),
    [
        (ControllerSection(), 2, 8),  # the gate was open
        (ControllerSection(), 1, 1),  # it was narrowed
        (PASSIVE, 1, 8),
    ],
)
def test_open_gate_of_a_restored_trainer_follows_a_raised_limit(
    controller: ControllerSection, ahead: int, after: int, tmp_path: Path
) -> None:
    def with_limit(max_ahead_steps: int) -> Trainer:
        settings = TrainerSettings(
            learner=LearnerSection(controller=controller, precision=Precision.FP32),
            algorithm=AlgorithmSection(),
            num_steps=10,
            max_ahead_steps=max_ahead_steps,
        )
        return Trainer(settings, Networks(policy=make_model()))

    trainer = with_limit(2)
    trainer.save(tmp_path).result(60)
    values = trainer.values()
    values["controller"]["ahead"] = ahead
    restored = with_limit(8)
    restored.restore(tmp_path, values)
    assert restored.max_ahead_steps == after


def test_non_finite_tensor_is_named_and_not_saved(tmp_path: Path) -> None:
    for part in ("model.", "optimizer."):
        trainer = make_trainer()
        trainer.train_on(make_samples(), version=0)
        found = trainer.tensors().items()
        name, tensor = next(each for each in found if each[0].startswith(part) and each[1].dim())
        tensor.detach().view(-1)[-1] = float("nan")
        with pytest.raises(WeightsNotFinite, match=f"^{re.escape(name)} has NaN"):
            trainer.save(tmp_path)
    assert not list(tmp_path.iterdir())


def test_moments_of_another_optimizer_are_refused(tmp_path: Path) -> None:
    trainer = make_trainer(optimizer=OptimizerKind.MUON)
    trainer.train_on(make_samples(seed=1), version=0)
    trainer.save(tmp_path).result(60)
    with pytest.raises(ConfigError, match=r"momentum_buffer.*learner\.optimizer"):
        make_trainer().restore(tmp_path, trainer.values())
