"""Laws of the measures of a step: operations, share of the matrix rate, profiles."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from common.config.algorithm import AlgorithmSection
from common.config.learner import ControllerSection, LearnerSection, Precision
from common.config.load import load_config
from common.errors import ConfigError
from learner.policy.forward import Networks
from learner.training.step import TrainerSettings
from learner.training.throughput import StepProfiler, matrix_rate, step_flops
from learner.training.trainer import Trainer
from tests.learner.builders import VOCAB, make_model, make_samples, with_prompts

PASSIVE = ControllerSection(scale_lr=False, tighten_gate=False, skip_step=False)
OF_LAYER = 2 * (4 + 2) * 8 * 32 + 3 * 32 * 64  # q, o, k, v; gate, up, down


def make_trainer(folder: Path | None = None, **settings) -> Trainer:
    cfg = LearnerSection(precision=Precision.FP32, controller=PASSIVE, **settings)
    made = TrainerSettings(learner=cfg, algorithm=AlgorithmSection(), num_steps=10)
    return Trainer(made, Networks(policy=make_model()), profile_folder=folder)


def test_step_flops_match_its_matrices() -> None:
    model = make_model()
    pairs = 4 * 8 * 2 * 2 * (3 * 4 / 2 + 5 * 6 / 2)  # heads x size x (scores, values) x (x, +)
    expected = 2 * (6 * 8 * OF_LAYER + 3 * pairs) + 6 * VOCAB * 32 * 4
    assert step_flops(model, [3, 5], 4) == expected
    once = 2 * (6 * 6 * OF_LAYER + 3 * pairs * 18 / 21) + 6 * VOCAB * 32 * 4
    assert step_flops(model, [3, 5], 4, repeated=[2]) == pytest.approx(once, rel=1e-12)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert step_flops(model, [3, 5], 4) == 2 * (4 * 8 * OF_LAYER + 3 * pairs) + 4 * VOCAB * 32 * 4


@pytest.mark.slow
def test_used_share_of_the_matrix_rate_follows_time_and_operations() -> None:
    trainer = make_trainer(ppo_epochs=2)
    samples = make_samples()
    unmeasured = trainer.train_on(samples, version=0).metrics
    assert "perf/mfu" not in unmeasured
    trainer.measure_rate()
    metrics = trainer.train_on(samples, version=1).metrics
    lengths = [len(sample.trajectory.token_ids) for sample in samples]
    num_scored = sum(sample.num_sampled_tokens for sample in samples)
    flops = 2 * step_flops(make_model(), lengths, num_scored)
    rate = metrics["perf/matrix_tflops"] * 1e12
    assert metrics["perf/mfu"] * rate * metrics["train/step_s"] == pytest.approx(flops)
    shown = metrics["perf/tokens_per_s_per_device"] * metrics["train/step_s"]
    assert shown == pytest.approx(sum(lengths))


@pytest.mark.slow
def test_used_share_counts_common_tokens_once() -> None:
    trainer = make_trainer()
    trainer.measure_rate()
    samples = with_prompts(make_samples())  # 3 groups of 2 with prompts of 20 tokens
    metrics = trainer.train_on(samples, version=0).metrics
    lengths = [len(sample.trajectory.token_ids) for sample in samples]
    num_scored = sum(sample.num_sampled_tokens for sample in samples)
    flops = step_flops(make_model(), lengths, num_scored, repeated=[20] * 3)
    rate = metrics["perf/matrix_tflops"] * 1e12
    assert metrics["perf/mfu"] * rate * metrics["train/step_s"] == pytest.approx(flops)


@pytest.mark.parametrize("num_minibatches", [1, 4, 100])
def test_tokens_and_operations_of_an_epoch_do_not_depend_on_its_division(
    num_minibatches: int,
) -> None:
    trainer = make_trainer(num_minibatches=num_minibatches)
    trainer._matrix_rate = 1e15
    samples = make_samples()  # Six trajectories of 3 groups.
    lengths = [len(sample.trajectory.token_ids) for sample in samples]
    flops = step_flops(make_model(), lengths, sum(each.num_sampled_tokens for each in samples))
    metrics = trainer.train_on(samples, version=0).metrics
    assert metrics["perf/mfu"] * 1e15 * metrics["train/step_s"] == pytest.approx(flops)
    assert metrics["train/num_computed_tokens"] == pytest.approx(sum(lengths))


@pytest.mark.slow
def test_rate_that_a_step_exceeds_is_measured_again() -> None:
    trainer = make_trainer()
    trainer._matrix_rate = 1.0  # As beside other programs.
    metrics = trainer.train_on(make_samples(), version=0).metrics
    assert metrics["perf/matrix_tflops"] > 1e-4
    assert 0 < metrics["perf/mfu"] <= 1


@pytest.mark.slow
def test_matrix_rate_is_positive_in_each_precision() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert 1e8 < matrix_rate(torch.device("cpu"), dtype) < 1e16


@pytest.mark.slow
def test_profile_has_the_operations_of_its_steps_only(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "profile", profile_steps=[2, 3])
    for version in range(2):
        trainer.train_on(make_samples(), version=version)
    assert not (tmp_path / "profile").exists()
    for version in range(2, 4):
        trainer.train_on(make_samples(), version=version)
    (path,) = (tmp_path / "profile").iterdir()
    assert path.name == "steps-2-3.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = [str(event.get("name")) for event in events]
    assert "aten::mm" in names or "aten::addmm" in names
    assert any("Backward" in name for name in names)
    assert sum("Optimizer.step#" in name for name in names) == 2


def test_restart_inside_the_profiled_steps_profiles_the_rest(tmp_path: Path) -> None:
    profiler = StepProfiler([2, 3], tmp_path, has_memory=False)
    with profiler.step(3):
        torch.ones(2, 2).mm(torch.ones(2, 2))
    assert [path.name for path in tmp_path.iterdir()] == ["steps-3-3.json.gz"]


def test_failed_step_leaves_no_running_profiler(tmp_path: Path) -> None:
    profiler = StepProfiler([1, 2], tmp_path, has_memory=False)
    with pytest.raises(KeyError), profiler.step(1):
        raise KeyError("step")
    again = StepProfiler([1, 1], tmp_path, has_memory=False)
    with again.step(1):
        torch.ones(2, 2).mm(torch.ones(2, 2))
    assert [path.name for path in tmp_path.iterdir()] == ["steps-1-1.json.gz"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["learner.profile_steps=[3]"], r"learner\.profile_steps=\[3\]: must be \[first, last\]"),
        (["learner.profile_steps=[3,2]"], r"must be \[first, last\] steps"),
        (["learner.memory_snapshot=true"], r"needs learner\.profile_steps=\[first, last\]"),
        (
            ["learner.memory_snapshot=true", "learner.profile_steps=[1,2]", "learner.device=cpu"],
            "needs a learner on CUDA",
        ),
    ],
)
def test_wrong_measures_are_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config("quickstart", overrides)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_snapshot_of_the_memory_lies_beside_the_profile(tmp_path: Path) -> None:
    profiler = StepProfiler([1, 1], tmp_path, has_memory=True)
    with profiler.step(1):
        torch.ones(1024, device="cuda")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["steps-1-1-memory.pickle", "steps-1-1.json.gz"]
