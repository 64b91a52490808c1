"""Laws of the measurement of updates that rounding to bf16 hides."""

import logging
from typing import Any

import pytest
import torch
from torch import nn

from common.config.learner import Precision
from learner.policy.precision import NUM_COMPARED, VanishedUpdates
from tests.learner.builders import make_model, make_model_with_adapters, make_samples, trainer_of

UNIT = 2.0**-7  # The distance of bf16 numbers between 1 and 2.


def network(weight: torch.Tensor, *, num_norms: int = 0) -> nn.Module:
    """Return a network of one matrix, and a vector that stays in fp32."""
    layer = nn.Module()
    layer.linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.linear.weight = nn.Parameter(weight)
    if num_norms:
        layer.norm = nn.LayerNorm(num_norms, bias=False)
    return layer


def moved(model: nn.Module, *changes: torch.Tensor | float) -> float:
    meter = VanishedUpdates(model, is_bf16=True)
    meter.begin()
    with torch.no_grad():
        for each, change in zip(model.parameters(), changes, strict=True):
            each += change
    return meter.share(lr=1e-5)


def test_share_counts_changed_weights_with_the_same_rounded_value() -> None:
    change = torch.zeros(20, 20)
    change[0] = 0.4 * UNIT  # 20 hidden updates
    change[1] = 0.6 * UNIT  # 20 seen updates
    change[2, :10] = 3 * UNIT  # 10 seen updates
    assert moved(network(torch.ones(20, 20)), change) == pytest.approx(0.4)
    assert moved(network(torch.ones(20, 20)), 0.0) == 0.0


def test_vector_that_stays_in_fp32_hides_nothing() -> None:
    model = network(torch.ones(20, 20), num_norms=100)
    assert moved(model, 1e-5, 1e-5) == pytest.approx(400 / 500)


def test_large_weights_are_sampled_in_proportion() -> None:
    torch.manual_seed(0)
    model = network(torch.ones(1000, 700), num_norms=70_000)
    change = torch.where(torch.rand(1000, 700) < 0.25, 1e-5, UNIT)
    meter = VanishedUpdates(model, is_bf16=True)
    meter.begin()
    assert meter._before is not None
    assert len(meter._before) < 3 * NUM_COMPARED
    assert moved(model, change, 1e-5) == pytest.approx(0.25 * 700 / 770, abs=0.01)


def trained(model: Any, precision: Precision, lr: float) -> float:
    trainer = trainer_of(model, precision, lr=lr)
    return trainer.train_on(make_samples(), version=0).metrics["train/vanished_update_frac"]


def test_step_reports_the_share_and_warns_with_the_remedy(caplog: Any) -> None:
    caplog.set_level(logging.WARNING)
    assert trained(make_model(), Precision.BF16, 1e-6) > 0.9
    (warning,) = [each.message for each in caplog.records if "vanished_update_frac" in each.message]
    assert "learner.precision=fp32" in warning
    caplog.clear()
    assert trained(make_model(), Precision.BF16, 1e-1) < 0.3
    assert trained(make_model_with_adapters(), Precision.BF16, 1e-1) < 0.3
    assert trained(make_model(), Precision.FP32, 1e-6) == 0.0
    assert not [each for each in caplog.records if "vanished_update_frac" in each.message]
