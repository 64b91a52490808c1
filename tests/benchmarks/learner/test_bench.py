"""Laws of the learner's measurements, and every check of the GPU suite, small, on the CPU."""

import io
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.learner.batch import (
    MODELS,
    BatchShape,
    make_batch,
    make_random_model,
    with_sampler_logprobs,
)
from benchmarks.learner.checks.agreement import score
from benchmarks.learner.checks.bench import SMALL, canary_delta
from benchmarks.learner.checks.weights import TOKENIZER
from benchmarks.learner.engine import EngineRun, measure_engine
from benchmarks.learner.memory import ScoringPeaks, peak_bytes, random_tokens, whole_logprobs
from benchmarks.learner.step import (
    BARE,
    StepCost,
    alternate,
    by_aggregation,
    make_trainer,
    measure_step,
)
from benchmarks.learner.suite import add_peaks, add_step_cost, measure_checkpoints
from benchmarks.suite import Suite
from benchmarks.weights.rounds import TransferSetup, send_rounds
from common.config.algorithm import AlgorithmSection
from common.config.learner import LearnerSection, Precision
from common.errors import EngineError, WeightSyncError
from common.weights.buckets import BucketLayout
from learner.batch.batching import collate_tokens
from learner.policy.model import Scoring, token_logprobs
from learner.weights.source import LiveWeights
from tests.learner.builders import VOCAB, make_model

CPU = torch.device("cpu")
SHAPE = BatchShape(num_groups=2, group_size=2, max_turns=3, observation_tokens=3, action_tokens=2)
FP32 = LearnerSection(device="cpu", precision=Precision.FP32, warmup_steps=0, lr=1e-3)


def make_suite() -> Suite:
    return Suite(out=io.StringIO())


def test_contenders_alternate_and_warm_ups_do_not_count() -> None:
    order: list[str] = []
    moments = iter(range(100))
    seconds = alternate(
        {name: (lambda name=name: order.append(name)) for name in ("a", "b")},
        num_rounds=3,
        clock=lambda: float(next(moments)),
    )
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a", "a", "b"]
    assert seconds == {"a": [1.0] * 3, "b": [1.0] * 3}


def test_checkpoints_are_written_alone_and_during_steps() -> None:
    small = dict(MODELS["larger"]) | {"num_hidden_layers": 1, "vocab_size": 512}
    speeds = measure_checkpoints(small, num_rounds=1)
    assert list(speeds) == ["plain", "alone", "training"]
    assert all(0 < each < 1_000 for each in speeds.values())


def test_ratio_is_the_median_over_rounds() -> None:
    seconds = {BARE: [1.0, 2.0, 4.0], "step": [1.5, 2.2, 4.0]}
    cost = StepCost(seconds=seconds, num_tokens=10)
    assert cost.ratios("step") == pytest.approx([1.5, 1.1, 1.0])
    assert cost.ratio("step") == pytest.approx(1.1)
    assert cost.tokens_per_s(BARE) == 5.0


@pytest.mark.parametrize(("step_s", "exit_code"), [(1.15, 0), (1.16, 1)])
def test_step_promise_is_judged_by_its_ratio(step_s: float, exit_code: int) -> None:
    suite = make_suite()
    seconds = {BARE: [1.0] * 3, "step": [step_s] * 3}
    add_step_cost(suite, StepCost(seconds=seconds, num_tokens=10), of="a model")
    assert suite.finish() == exit_code


@pytest.mark.parametrize(("chunked_bytes", "exit_code"), [(25, 0), (26, 1)])
def test_memory_promise_is_judged_by_its_share(chunked_bytes: int, exit_code: int) -> None:
    suite = make_suite()
    peaks = ScoringPeaks(chunked_bytes=chunked_bytes, whole_bytes=100, mean_difference=0.0)
    add_peaks(suite, peaks, of="a model")
    assert suite.finish() == exit_code


def test_peak_counts_simultaneously_live_memory() -> None:
    def run() -> None:
        first = torch.empty(1_000_000)  # 4 MB, gone before the next
        del first
        second = torch.empty(500_000)
        second = second + 1.0  # two times 2 MB for a moment

    assert peak_bytes(run, CPU) == pytest.approx(4_000_000, abs=1_000)
    kept = torch.empty(2_000_000)  # Older memory does not count.
    assert peak_bytes(lambda: kept[:1].clone(), CPU) < 1_000


def test_whole_and_chunked_scores_are_the_same() -> None:
    model = make_model()
    sequences = [np.array([1, 2, 3, 4]), np.array([5, 6, 7])]
    masks = [np.arange(len(each)) > 0 for each in sequences]
    tokens = collate_tokens(sequences, masks, device=CPU)
    whole = whole_logprobs(model, tokens, dtype=torch.float32)
    chunked = token_logprobs(model, tokens, Scoring(chunk_tokens=2, dtype=torch.float32))
    assert whole.tolist() == pytest.approx(chunked.tolist(), abs=1e-5)


def test_random_batch_has_the_requested_shape() -> None:
    samples = make_batch(SHAPE, vocab_size=VOCAB, seed=0)
    assert [s.trajectory.group_id for s in samples] == ["g0", "g0", "g1", "g1"]
    for sample in samples:
        trajectory = sample.trajectory
        assert len(trajectory.token_ids) == 5 * trajectory.num_turns
        assert sample.num_sampled_tokens == 2 * trajectory.num_turns
        assert trajectory.token_ids.max() < VOCAB
    assert sum(sample.advantage for sample in samples) == 0.0


def test_sampler_logprobs_are_near_the_policy_but_not_equal() -> None:
    trainer = make_trainer(FP32, AlgorithmSection(), make_model(), engine_dtype="float32")
    samples = with_sampler_logprobs(make_batch(SHAPE, vocab_size=VOCAB, seed=0), trainer, seed=0)
    metrics = trainer.train_on(samples, version=3).metrics
    assert 0.95 < metrics["offpolicy/ess_frac"] < 1.0
    assert metrics["offpolicy/lag_max"] == 3.0


def test_both_aggregations_are_measured_against_the_bare_step() -> None:
    algorithms = by_aggregation(AlgorithmSection())
    cost = measure_step(FP32, algorithms, make_model(), SHAPE, num_rounds=2, engine_dtype="float32")
    assert list(cost.seconds) == [BARE, "grpo, token", "grpo, sequence"]
    assert all(len(seconds) == 2 for seconds in cost.seconds.values())
    assert cost.ratio("grpo, token") > 0.0


def test_step_without_update_is_not_measured() -> None:
    model = make_model()
    model.lm_head.weight.data[0, 0] = math.nan
    with pytest.raises(ValueError, match="left out its update"):
        measure_step(
            FP32, {"grpo": AlgorithmSection()}, model, SHAPE, num_rounds=2, engine_dtype="float32"
        )


def test_measuring_leaves_the_model_alone() -> None:
    model = make_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    algorithms = {"grpo": AlgorithmSection()}
    measure_step(FP32, algorithms, model, SHAPE, num_rounds=1 + 1, engine_dtype="float32")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_canary_delta_is_distance_of_scores() -> None:
    model = make_model()
    trainer = make_trainer(FP32, AlgorithmSection(), model, engine_dtype="float32")
    sequences = [[1, 2, 3], [4, 5]]
    known = trainer.score(sequences)
    assert canary_delta(known, model, sequences) < 1e-5
    moved = [
        [score + sign * 0.3 for score in row] for sign, row in zip((1, -1), known, strict=True)
    ]
    assert canary_delta(moved, model, sequences) == pytest.approx(0.3, abs=1e-5)


def test_smaller_chunks_need_less_memory() -> None:
    small = {"vocab_size": 4_000, "hidden_size": 16, "intermediate_size": 16}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 1}
    model = make_random_model({**SMALL.model, **small, **layers}, device=CPU)
    tokens = random_tokens(model, 4, 40)
    few, many = (partial(score, model, tokens, size, dtype=torch.float32) for size in (8, 1_000))
    assert (few() - many()).abs().mean() < 1e-5
    assert peak_bytes(few, CPU) < peak_bytes(many, CPU) / 4


@pytest.mark.long
@pytest.mark.slow
def test_sending_reports_the_receivers_error() -> None:
    source = LiveWeights([("weights", torch.ones(1_000))], torch.bfloat16)
    cut = BucketLayout(source.total_bytes, 512)
    with pytest.raises(WeightSyncError, match=r"(?s)receiver:.*nowhere"):
        send_rounds(
            source, cut, ["ours"], route=TransferSetup(peer_device="nowhere", timeout_s=15.0)
        )


@pytest.mark.long
@pytest.mark.slow
def test_sender_needs_two_buckets() -> None:
    source = LiveWeights([("weights", torch.ones(40 << 20))], torch.bfloat16)
    cut = BucketLayout(source.total_bytes, 16 << 20)
    assert cut.num == 5
    plan = ["ours"] * 10  # Peaks are short.
    sent = send_rounds(source, cut, plan, route=TransferSetup(), watches_memory=True)
    assert 1.5 * cut.slot_bytes < sent.peak_bytes < 2.25 * cut.slot_bytes  # Not a third one.


@pytest.mark.slow
@pytest.mark.long
def test_failed_engine_start_reports_last_output(tmp_path: Path) -> None:
    model = make_model()
    trainer = make_trainer(FP32, AlgorithmSection(), model, engine_dtype="float32")
    with pytest.raises(EngineError, match="engine ended: exit code 1"):
        measure_engine(
            trainer,
            model,
            EngineRun(dtype="float32", max_tokens=-20),
            tokenizer_path=str(TOKENIZER),
            canary=[[1, 2, 3]],
            folder=tmp_path,
        )
