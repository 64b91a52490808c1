"""Laws of passes in fp16 and of the scale of their losses."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.config.algorithm import AlgorithmSection
from common.config.learner import (
    Activations,
    Attention,
    ControllerSection,
    Layout,
    LearnerSection,
    LoraSection,
    OptimizerKind,
    Precision,
)
from common.config.load import load_config
from common.errors import ConfigError
from learner.batch.batching import Sample
from learner.policy.finite import TrainingDiverged
from learner.policy.forward import Networks
from learner.policy.precision_choice import check_engines
from learner.training.optimizer import LossScale
from learner.training.ranks import Ranks
from learner.training.step import Gradients, TrainerSettings
from learner.training.trainer import Trainer
from tests.learner.builders import make_model, make_model_with_adapters, make_samples, with_prompts
from tests.learner.experts import make_experts
from tests.learner.weights.test_exact_learners import make_cfg, same, started

HALF_UNIT = 2.0**-11  # Largest relative error of rounding a number to fp16.
IDS = [[5, 9, 17, 30, 41, 8, 7, 12, 6, 33, 25, 19], [3, 44, 2, 11, 29, 13, 40]]


def settings_of(precision: Precision, **keys: Any) -> TrainerSettings:
    learner = LearnerSection(
        device="cpu",
        precision=precision,
        warmup_steps=0,
        controller=ControllerSection(skip_step=False),
        **{"lr": 1e-3, **keys},
    )
    return TrainerSettings(
        learner=learner, algorithm=AlgorithmSection(), num_steps=100, engine_dtype="float16"
    )


def trainer(model: Any = None, **keys: Any) -> Trainer:
    return Trainer(settings_of(Precision.FP16, **keys), Networks(policy=model or make_model()))


def overflowing(samples: list[Sample]) -> list[Sample]:
    """Let the gradient of the first sample exceed fp16 with any large scale."""
    return [replace(samples[0], advantage=1e5), *samples[1:]]


def weights_of(made: Trainer) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in made.tensors().items()}


def gradient_of(model: Any, precision: Precision, *, scale: float = 1.0, **keys: Any) -> Tensor:
    """Return the gradient of a batch without its scale, [weight]."""
    gradients = Gradients(settings_of(precision, **keys), Networks(policy=model), Ranks())
    batch = gradients.prepare(with_prompts(make_samples()), 0)
    gradients.accumulate(batch, range(len(batch.samples)), scale=scale)
    parts = [each.grad.flatten() for each in model.parameters() if each.grad is not None]
    return torch.cat(parts) / scale


NETWORKS: dict[str, tuple[Any, dict[str, Any]]] = {
    "prefix trees": (make_model, {}),
    "fused attention": (make_model, {"attention": Attention.FUSED}),
    "padded": (make_model, {"layout": Layout.PADDED}),
    "chunks of the head": (make_model, {"logprob_chunk_tokens": 4}),
    "recomputed activations": (make_model, {"activations": Activations.RECOMPUTE}),
    "offloaded activations": (make_model, {"activations": Activations.OFFLOAD}),
    "adapters": (make_model_with_adapters, {}),
    "experts": (lambda: make_experts("qwen3_moe"), {}),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_gradient_in_fp16_is_that_of_fp32_within_rounding(name: str) -> None:
    make, keys = NETWORKS[name]
    exact = gradient_of(make(), Precision.FP32, **keys)
    apart: dict[Precision, Tensor] = {}
    for precision, scale in ((Precision.FP16, LossScale.FIRST), (Precision.BF16, 1.0)):
        made = gradient_of(make(), precision, scale=scale, **keys)
        apart[precision] = (made - exact).norm() / exact.norm()
    assert 0 < apart[Precision.FP16] < 8 * HALF_UNIT
    # The units of bf16 are eight times as large.
    assert apart[Precision.FP16] < apart[Precision.BF16] / 4


def test_metrics_are_those_without_the_scale() -> None:
    exact = Trainer(settings_of(Precision.FP32), Networks(policy=make_model()))
    ours, theirs = (made.train_on(make_samples(), version=0).metrics for made in (trainer(), exact))
    assert ours["train/loss_scale"] == LossScale.FIRST
    assert ours["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=8 * HALF_UNIT)
    assert ours["loss/policy"] == pytest.approx(theirs["loss/policy"], abs=1e-3)
    assert "train/loss_scale" not in theirs


MAKERS = {
    "adamw": trainer,
    "muon": lambda: trainer(optimizer=OptimizerKind.MUON),
    "adapters": lambda: trainer(make_model_with_adapters()),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_overflow_changes_the_scale_only_and_the_next_step_trains(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    made = MAKERS[kind]()
    made.train_on(make_samples(), version=0)
    before, values = weights_of(made), made.values()
    metrics = made.train_on(overflowing(make_samples()), version=1).metrics
    assert same(weights_of(made), before)
    assert metrics["train/num_overflows"] == 1.0
    assert metrics["train/num_bad_updates"] == metrics["train/num_updates"] == 0.0
    assert metrics["train/loss_scale"] == LossScale.FIRST / 2
    assert made.values()["num_updates"] == values["num_updates"]
    (warning,) = [each.getMessage() for each in caplog.records]
    assert "overflowed in fp16 version=1 num_overflows=1 next_loss_scale=32768" in warning
    metrics = made.train_on(make_samples(), version=2).metrics
    assert metrics["train/num_updates"] == 1.0
    assert metrics["train/num_overflows"] == 0.0
    assert metrics["train/loss_scale"] == LossScale.FIRST / 2
    assert not same(weights_of(made), before)


def test_overflow_in_one_minibatch_does_not_stop_the_other() -> None:
    made = trainer(num_minibatches=2)
    metrics = made.train_on(overflowing(make_samples()), version=0).metrics
    assert metrics["train/num_overflows"] == metrics["train/num_updates"] == 1.0


def test_infinite_loss_is_a_bad_update_and_keeps_the_scale() -> None:
    model = make_model()
    made = trainer(model)
    model.model.norm.register_forward_hook(lambda *call: call[2] * torch.inf)
    metrics = made.train_on(make_samples(), version=0).metrics
    assert metrics["train/num_bad_updates"] == 1.0
    assert metrics["train/num_overflows"] == 0.0
    assert metrics["train/loss_scale"] == LossScale.FIRST


def test_gradients_that_overflow_with_every_scale_end_the_run() -> None:
    model = make_model()
    made = trainer(model)
    model.lm_head.weight.register_hook(lambda gradient: gradient * torch.inf)
    for version in range(16):
        assert made.train_on(make_samples(), version=version).metrics["train/num_overflows"] == 1.0
    assert made.values()["loss_scale"]["value"] == LossScale.LEAST
    for version in (16, 17):
        metrics = made.train_on(make_samples(), version=version).metrics
        assert metrics["train/num_bad_updates"] == 1.0
    with pytest.raises(TrainingDiverged, match="3 consecutive steps"):
        made.train_on(make_samples(), version=18)


def test_scale_doubles_after_2000_updates_without_an_overflow() -> None:
    scale = LossScale(torch.float16)
    for _ in range(1999):
        scale.count_good()
    assert scale.shrink()
    for _ in range(1999):
        scale.count_good()
    assert scale.value == LossScale.FIRST / 2
    scale.count_good()
    assert (scale.value, scale.num_good) == (LossScale.FIRST, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_of_other_dtypes_have_no_scale(dtype: torch.dtype) -> None:
    scale = LossScale(dtype)
    assert not scale.shrink()
    for _ in range(2000):
        scale.count_good()
    assert scale.value == 1.0


def test_resumed_trainer_continues_with_the_same_scale(tmp_path: Path) -> None:
    made = trainer()
    made.train_on(make_samples(), version=0)
    made.train_on(overflowing(make_samples()), version=1)
    made.train_on(make_samples(seed=2), version=2)
    made.save(tmp_path).result()
    values = json.loads(json.dumps(made.values()))
    resumed = trainer()
    resumed.restore(tmp_path, values)
    assert resumed.values() == made.values()
    assert values["loss_scale"] == {"value": LossScale.FIRST / 2, "num_good": 1}
    for each in (made, resumed):
        each.train_on(make_samples(seed=3), version=3)
    assert same(weights_of(made), weights_of(resumed))


def test_run_in_bf16_that_resumes_in_fp16_begins_with_the_first_scale(tmp_path: Path) -> None:
    before = Trainer(settings_of(Precision.BF16), Networks(policy=make_model()))
    before.save(tmp_path).result()
    made = trainer()
    made.restore(tmp_path, before.values())
    assert made.values()["loss_scale"]["value"] == LossScale.FIRST


def test_weight_above_the_numbers_of_fp16_is_refused_by_name() -> None:
    model: Any = make_model()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3, 4] = -70_000.0
    made = trainer(model)
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.up_proj\.weight.* above 65,504"):
        made.check_start(may_pad=False)
    trainer().check_start(may_pad=False)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_agree_on_the_scale_and_on_the_gradient(tmp_path: Path) -> None:
    """The overflow is in the share of one rank; one rank alone makes the same steps."""
    metrics: dict[int, list[dict[str, float]]] = {}
    scores: dict[int, Tensor] = {}
    for kind, num_ranks in (("plain", 1), ("two ranks", 2)):
        cfg = make_cfg(tmp_path / kind, kind, "fp16")
        metrics[num_ranks] = []
        with started(cfg) as learner:
            for version, batch in enumerate(
                [make_samples(), overflowing(make_samples(seed=1)), make_samples(seed=2)]
            ):
                before = learner.version()
                result = learner.trainer.train_on(batch, version=version)
                metrics[num_ranks].append(result.metrics)
                assert same(learner.version(), before) == (version == 1)
            rows = learner.trainer.score(IDS)
            scores[num_ranks] = torch.tensor([each for row in rows for each in row])
    for one, two in zip(metrics[1], metrics[2], strict=True):
        for name in ("train/loss_scale", "train/num_overflows", "train/num_updates"):
            assert one[name] == two[name], name
        if one["train/num_updates"]:
            norm = one["train/grad_norm"]
            assert two["train/grad_norm"] == pytest.approx(norm, rel=16 * HALF_UNIT)
    assert (scores[1] - scores[2]).abs().max() < 0.01


def test_combinations_that_fp16_cannot_compute_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"learner\.rounding='stochastic'.*precision=fp16"):
        load_config("smoke", ["learner.precision=fp16", "learner.rounding=stochastic"])
    base = ["learner.precision=fp16", "learner.lora.rank=4", "model.base=nf4"]
    with pytest.raises(ConfigError, match=r"model\.base='nf4'.*learner\.precision=fp16"):
        load_config("smoke", [*base, "learner.optimizer=adamw"])
    adapted = LearnerSection(lora=LoraSection(rank=4), optimizer=OptimizerKind.ADAMW)
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(ConfigError, match=r"model\.dtype=float16, or learner\.precision"):
            check_engines(adapted, Precision.FP16, dtype)
    with pytest.raises(ConfigError, match=r"would round each version again.*model\.dtype=float16"):
        check_engines(LearnerSection(), Precision.FP16, "bfloat16")
    check_engines(LearnerSection(), Precision.FP16, "float32")
    check_engines(adapted, Precision.FP16, "float16")
