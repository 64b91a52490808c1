"""Laws of the choice between bf16 and fp32."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from common.config.learning import LearnerSection, Precision
from learner.policy import precision
from learner.policy.precision import (
    Timings,
    faster,
    precision_by_rule,
    settle_precision,
    time_passes,
    uses_bf16,
)
from tests.learner.builders import make_model

SLOW_BF16 = Timings(bf16_s=0.02, fp32_s=0.01)
SLOW_FP32 = Timings(bf16_s=0.01, fp32_s=0.02)


def settled(
    file: Path,
    timings: Timings = SLOW_BF16,
    *,
    wanted: Precision = Precision.AUTO,
    is_repeatable: bool = False,
) -> Precision:
    return settle_precision(
        LearnerSection(precision=wanted),
        make_model(),
        file,
        is_repeatable=is_repeatable,
        measure=lambda _: timings,
    ).precision


def refusing() -> Callable[[PreTrainedModel], Timings]:
    def measure(_: PreTrainedModel) -> Timings:
        raise AssertionError("nothing was to be timed")

    return measure


def test_the_faster_one_is_taken_whatever_the_units_of_the_cpu_are(tmp_path: Path) -> None:
    assert settled(tmp_path / "a.json", SLOW_BF16) is Precision.FP32
    assert settled(tmp_path / "b.json", SLOW_FP32) is Precision.BF16


@pytest.mark.parametrize("rule", [Precision.BF16, Precision.FP32])
def test_a_difference_that_may_be_noise_is_left_to_the_rule(rule: Precision) -> None:
    assert faster(Timings(bf16_s=1.0, fp32_s=1.19), rule) is rule
    assert faster(Timings(bf16_s=1.19, fp32_s=1.0), rule) is rule
    assert faster(Timings(bf16_s=1.0, fp32_s=1.21), rule) is Precision.BF16
    assert faster(Timings(bf16_s=1.21, fp32_s=1.0), rule) is Precision.FP32


def test_a_run_that_goes_on_keeps_what_its_first_start_has_found(tmp_path: Path) -> None:
    file = tmp_path / "precision.json"
    assert settled(file, SLOW_BF16) is Precision.FP32
    assert settled(file, SLOW_FP32) is Precision.FP32
    found = json.loads(file.read_text())
    assert found == {"precision": "fp32", "timings": {"bf16_s": 0.02, "fp32_s": 0.01}}


def test_what_is_configured_holds_and_is_not_timed(tmp_path: Path) -> None:
    file = tmp_path / "precision.json"
    assert settled(file, SLOW_BF16) is Precision.FP32
    assert settled(file, wanted=Precision.BF16) is Precision.BF16
    learner = LearnerSection(precision=Precision.BF16)
    settle_precision(learner, make_model(), file, is_repeatable=False, measure=refusing())


def test_a_run_that_must_repeat_itself_follows_the_rule_and_times_nothing(tmp_path: Path) -> None:
    learner = settle_precision(
        LearnerSection(),
        make_model(),
        tmp_path / "precision.json",
        is_repeatable=True,
        measure=refusing(),
    )
    assert learner.precision is precision_by_rule("cpu")


def test_timing_stays_within_its_budget_and_leaves_the_model_as_it_was() -> None:
    model = make_model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    state = torch.get_rng_state()
    timings = time_passes(model, budget_s=0.1)
    assert 0 < timings.bf16_s + timings.fp32_s < 0.1
    assert torch.get_rng_state().equal(state)
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert parameter.grad is None
        assert parameter.detach().equal(old)


def timed_by(monkeypatch: pytest.MonkeyPatch, rounds: list[Timings]) -> list[int]:
    """Let the passes cost what `rounds` says; return how many threads each of them had."""
    left, threads = iter(rounds), list[int]()

    def time_both(*_: object) -> Timings:
        threads.append(torch.get_num_threads())
        return next(left)

    monkeypatch.setattr(precision, "_time_both", time_both)
    return threads


def test_first_passes_that_make_the_kernels_do_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_start = Timings(bf16_s=0.15, fp32_s=0.07)
    timed_by(monkeypatch, [slow_start, Timings(bf16_s=0.06, fp32_s=0.08)])
    assert time_passes(make_model(), budget_s=0.1) == Timings(bf16_s=0.06, fp32_s=0.08)


def test_passes_of_a_large_model_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    large = Timings(bf16_s=2.0, fp32_s=3.0)
    timed_by(monkeypatch, [large])
    assert time_passes(make_model()) == large


def test_passes_are_timed_with_one_thread_and_the_others_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        threads = timed_by(monkeypatch, [SLOW_BF16] * 9)
        time_passes(make_model())
        assert threads
        assert set(threads) == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_what_nobody_has_settled_follows_the_rule() -> None:
    cpu = torch.device("cpu")
    assert uses_bf16(LearnerSection(precision=Precision.BF16), cpu)
    assert not uses_bf16(LearnerSection(precision=Precision.FP32), cpu)
    assert uses_bf16(LearnerSection(), cpu) is (precision_by_rule("cpu") is Precision.BF16)
