"""Laws of the choice between several ways of computing the same."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from common.config.learner import Attention, Layout, LearnerSection, Precision
from learner.policy import timing
from learner.policy.precision import pass_dtype, precision_by_rule
from learner.policy.precision_choice import recorded_precision
from learner.policy.timing import (
    ComputeConfig,
    Timed,
    best_threads,
    choose_compute,
    fastest,
    settled,
    time_configs,
    with_settled,
)
from tests.learner.builders import make_model

BF16, FP16, FP32 = Precision.BF16, Precision.FP16, Precision.FP32
PLAIN = ComputeConfig(FP32, Layout.PADDED, Attention.PRODUCTS)
PACKED = ComputeConfig(FP32, Layout.PACKED, Attention.PRODUCTS)
FUSED = ComputeConfig(FP32, Layout.PACKED, Attention.FUSED)
SAID = torch.tensor([-1.0, -2.0])


class Clock:
    """Lets a way cost what its parts cost together."""

    def __init__(self, **costs: float) -> None:
        self.costs = costs
        self.asked: list[ComputeConfig] = []

    def __call__(
        self, model: PreTrainedModel, ways: Sequence[ComputeConfig]
    ) -> Mapping[ComputeConfig, Timed]:
        self.asked += ways
        return {
            way: Timed(sum(self.costs.get(x, 1) for x in way.name.split()), SAID) for way in ways
        }


def settle(file: Path, clock: Clock, *, is_repeatable: bool = False, **keys: Any) -> ComputeConfig:
    found = choose_compute(
        LearnerSection(**keys),
        make_model(),
        file,
        is_repeatable=is_repeatable,
        max_seq_tokens=64,
        num_cores=1,
        measure=clock,
    )
    assert found.num_threads == 1
    return ComputeConfig(found.precision, found.layout, found.attention)


@pytest.mark.parametrize("layout", [Layout.PACKED, Layout.PADDED])
@pytest.mark.parametrize("attention", [Attention.PRODUCTS, Attention.FUSED])
def test_fastest_configuration_overrides_the_rules(
    tmp_path: Path, layout: Layout, attention: Attention
) -> None:
    clock = Clock(**dict.fromkeys((layout.value, attention.value), 0.1))
    file = tmp_path / "precision.json"
    expected = ComputeConfig(precision_by_rule("cpu"), layout, attention)
    assert settle(file, clock) == expected
    slower = Clock(**dict.fromkeys((layout.value, attention.value), 9.0))
    assert settle(file, slower) == expected  # The run keeps its choice.
    assert not slower.asked


def test_timing_never_chooses_the_precision(tmp_path: Path) -> None:
    for name in ("bf16", "fp32"):
        clock = Clock(**{name: 0.001})
        section = settle(tmp_path / f"{name}.json", clock)
        assert section.precision is precision_by_rule("cpu")
        assert {way.precision for way in clock.asked} == {section.precision}


def test_file_has_the_precision_and_its_reason(tmp_path: Path) -> None:
    file = tmp_path / "precision.json"
    settle(file, Clock(), precision=BF16)
    assert recorded_precision(file) == "bf16 (learner.precision is set)"
    settle(file, Clock(), precision=FP32)
    assert recorded_precision(file) == "fp32 (learner.precision is set since a later start)"
    assert settle(file, Clock()).precision is FP32  # The run keeps its choice.


def test_configured_values_hold_without_timing(tmp_path: Path) -> None:
    clock = Clock(padded=9.0)
    chosen = settle(tmp_path / "a.json", clock, precision=FP32, layout=Layout.PADDED)
    assert (chosen.precision, chosen.layout) == (FP32, Layout.PADDED)
    assert {way.layout for way in clock.asked} == {Layout.PADDED}
    keys = {"precision": BF16, "layout": Layout.PACKED, "attention": Attention.FUSED}
    assert settle(tmp_path / "a.json", Clock(), **keys) == ComputeConfig(*keys.values())
    fixed = Clock()
    settle(tmp_path / "b.json", fixed, **keys)
    assert not fixed.asked


def test_repeatable_run_follows_rules_without_timing(tmp_path: Path) -> None:
    clock = Clock()
    found = settle(tmp_path / "precision.json", clock, is_repeatable=True)
    assert found == ComputeConfig(precision_by_rule("cpu"), Layout.PACKED, Attention.PRODUCTS)
    assert not clock.asked


def test_run_without_a_recorded_layout_keeps_the_old_one(tmp_path: Path) -> None:
    file = tmp_path / "precision.json"
    file.write_text(json.dumps({"precision": "bf16", "timings": None}), encoding="utf-8")
    assert settle(file, Clock(padded=9.0)) == ComputeConfig(BF16, Layout.PADDED, Attention.PRODUCTS)


def test_difference_within_noise_leaves_the_rule() -> None:
    for rule in (PLAIN, PACKED):
        for other in (0.85, 1.0, 1.19):
            timed = {PLAIN: Timed(1.0, SAID), PACKED: Timed(other, SAID)}
            assert fastest(timed, rule=rule, max_delta=0.05) is rule
    timed = {PLAIN: Timed(1.21, SAID), PACKED: Timed(1.0, SAID)}
    assert fastest(timed, rule=PLAIN, max_delta=0.05) is PACKED


def test_configuration_with_different_logprobs_is_never_chosen() -> None:
    timed = {
        PLAIN: Timed(3.0, SAID),
        PACKED: Timed(2.0, SAID + 0.07),
        FUSED: Timed(0.1, SAID - 0.08),
        replace(FUSED, precision=BF16): Timed(0.1, SAID + float("nan")),
    }
    for rule in timed:
        assert fastest(timed, rule=rule, max_delta=0.05) is PACKED


def test_timing_respects_budget_and_preserves_model() -> None:
    model = make_model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    state = torch.get_rng_state()
    timed = time_configs(model, [PLAIN, PACKED, FUSED], num_tokens=40, budget_s=0.1)
    assert 0 < sum(each.seconds for each in timed.values()) < 0.1
    for way in (PACKED, FUSED):
        torch.testing.assert_close(timed[way].logprobs, timed[PLAIN].logprobs, atol=1e-5, rtol=0)
    assert torch.get_rng_state().equal(state)
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert parameter.grad is None
        assert parameter.detach().equal(old)


def timed_by(monkeypatch: pytest.MonkeyPatch, seconds: list[float]) -> list[int]:
    """Let the passes take `seconds`; return the number of threads of each."""
    left, threads = iter(seconds), list[int]()

    def time_pass(*_: object) -> Timed:
        threads.append(torch.get_num_threads())
        return Timed(next(left), SAID)

    monkeypatch.setattr(timing, "_time_pass", time_pass)
    return threads


def test_timing_ignores_passes_that_compile_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    timed_by(monkeypatch, [0.15, 0.07, 0.06, 0.08])
    timed = time_configs(make_model(), [PLAIN, PACKED], num_tokens=40, budget_s=0.1)
    assert [timed[way].seconds for way in (PLAIN, PACKED)] == [0.06, 0.08]


def test_passes_of_a_large_model_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    timed_by(monkeypatch, [2.0, 3.0])
    timed = time_configs(make_model(), [PLAIN, PACKED], num_tokens=40)
    assert [timed[way].seconds for way in (PLAIN, PACKED)] == [2.0, 3.0]


def test_timing_uses_one_thread_and_restores_the_thread_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        threads = timed_by(monkeypatch, [0.02] * 20)
        time_configs(make_model(), [PLAIN, PACKED], num_tokens=40)
        assert set(threads) == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("by_threads", "num_cores", "expected"),
    [
        ([1.0, 0.6, 0.35], 4, 4),
        ([1.0, 0.6, 0.55], 4, 2),
        ([1.0, 0.9], 4, 1),
        ([1.0, 0.6], 3, 2),
        ([], 1, 1),
    ],
)
def test_threads_double_while_it_helps_and_cores_remain(
    monkeypatch: pytest.MonkeyPatch, by_threads: list[float], num_cores: int, expected: int
) -> None:
    before = torch.get_num_threads()
    threads = timed_by(monkeypatch, [s for each in by_threads for s in (each + 1.0, each, each)])
    assert best_threads(make_model(), PLAIN, num_cores, num_tokens=40) == expected
    assert threads == [2**i for i in range(len(by_threads)) for _ in range(3)]
    assert torch.get_num_threads() == before


def test_all_ranks_use_one_configuration() -> None:
    keys = {"precision": BF16, "layout": Layout.PADDED, "attention": Attention.FUSED}
    learner = LearnerSection(num_threads=3, **keys)
    assert with_settled(LearnerSection(), json.loads(json.dumps(settled(learner)))) == learner


def test_unsettled_precision_follows_the_rule() -> None:
    cpu = torch.device("cpu")
    assert pass_dtype(LearnerSection(precision=BF16), cpu) is torch.bfloat16
    assert pass_dtype(LearnerSection(precision=FP16), cpu) is torch.float16
    assert pass_dtype(LearnerSection(precision=FP32), cpu) is torch.float32
    by_rule = precision_by_rule("cpu") is BF16
    assert (pass_dtype(LearnerSection(), cpu) is torch.bfloat16) is by_rule
