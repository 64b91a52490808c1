"""Laws of the measurement of updates that rounding to bf16 hides."""

import logging
from typing import Any

import pytest
import torch
from torch import nn

from common.config.learner import Precision, Rounding
from learner.policy.precision import (
    NUM_COMPARED,
    RoundedWeights,
    VanishedUpdates,
    draw_bits,
    round_stochastically,
)
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
    meter = VanishedUpdates(model, dtype=torch.bfloat16)
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
    meter = VanishedUpdates(model, dtype=torch.bfloat16)
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


def rounded(weight: torch.Tensor, number: int, *, name: str = "matrix") -> torch.Tensor:
    into = torch.empty_like(weight)
    round_stochastically(weight, into, name=name, number=number, first=0)
    return into


def test_mean_of_stochastic_rounding_is_the_weight() -> None:
    low = torch.tensor([1.0, -1.0, 2.0**-9, -3.0 * 2.0**20])
    units = torch.tensor([UNIT, -UNIT, 2.0**-9 * UNIT, -(2.0**21) * UNIT])
    shares = torch.tensor([0.0, 0.01, 0.3, 0.5, 0.95])
    weights = (low[:, None] + units[:, None] * shares).repeat_interleave(400, 0)  # [1600, share]
    total = torch.zeros_like(weights)
    for number in range(100):
        made = rounded(weights.reshape(-1), number + 1).view_as(weights)
        assert torch.equal(made.bfloat16().float(), made)
        total += (made - weights) / units.repeat_interleave(400)[:, None]
    error = total.view(4, 400, 5).mean(1) / 100
    # 40,000 draws: three standard errors of a fair coin are .0075.
    assert error.abs().max() < 0.0075
    assert torch.equal(error[:, 0], torch.zeros(4))


def test_stochastic_rounding_follows_from_name_number_and_index() -> None:
    weight = torch.rand(200_000, generator=torch.Generator().manual_seed(0))
    whole = rounded(weight, 7)
    assert torch.equal(rounded(weight, 7), whole)
    assert not torch.equal(rounded(weight, 8), whole)
    assert not torch.equal(rounded(weight, 7, name="other"), whole)
    part = torch.empty(100_001)
    round_stochastically(weight[77_777:177_778], part, name="matrix", number=7, first=77_777)
    assert torch.equal(part, whole[77_777:177_778])


def test_drawn_bits_of_versions_and_weights_are_independent() -> None:
    columns = [
        draw_bits(name, number, first, 100_000, torch.device("cpu")).double() / 65_535 - 0.5
        for name, number, first in (("a", 1, 0), ("a", 2, 0), ("b", 1, 0), ("a", 1, 2**31 - 50_000))
    ]
    moments = torch.corrcoef(torch.stack(columns))
    assert (moments - torch.eye(4)).abs().max() < 0.015  # Standard error: .003.
    for column in columns:
        assert abs(column.mean()) < 0.004
        assert torch.corrcoef(torch.stack([column[1:], column[:-1]]))[0, 1].abs() < 0.015
        counts = torch.histc(column, bins=16)
        assert (counts / 6_250 - 1).abs().max() < 0.06


def test_share_compares_the_copies_that_the_pass_uses() -> None:
    """A quarter of a unit moves a quarter of the copies, and nothing is hidden in the mean."""
    model = network(torch.ones(200, 200))
    copies = RoundedWeights(model)
    copies.take(0)
    meter = VanishedUpdates(model, dtype=torch.bfloat16, copies=copies)
    meter.begin()
    weight = next(model.parameters())
    with torch.no_grad():
        copies.put()
        weight += UNIT / 4
        copies.take(1)
    assert meter.share(lr=1e-5) == pytest.approx(0.75, abs=0.01)
    assert weight.mean().item() == pytest.approx(1 + UNIT / 4, abs=0.01 * UNIT)
    copies.put()
    assert torch.equal(weight, torch.full((200, 200), 1 + UNIT / 4))


def test_step_with_stochastic_rounding_logs_no_warning(caplog: Any) -> None:
    caplog.set_level(logging.WARNING)
    model = make_model()
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(each.bfloat16())
    trainer = trainer_of(model, Precision.BF16, lr=1e-6, rounding=Rounding.STOCHASTIC)
    metrics = trainer.train_on(make_samples(), version=0).metrics
    assert metrics["train/vanished_update_frac"] > 0.9
    assert not [each for each in caplog.records if "vanished_update_frac" in each.message]
