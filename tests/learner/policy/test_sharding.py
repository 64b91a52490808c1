"""Laws of sharded networks in bf16: two ranks train as one process does."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.conformance.networks import save_network
from common.config.learner import ControllerSection, LearnerSection, Precision
from common.config.model import ModelSection
from common.config.run_config import RunConfig
from learner.batch.batching import Sample
from tests.learner.builders import make_trajectory, tensors_of
from tests.learner.policy.test_expert_ranks import trainer_of

pytestmark = [pytest.mark.slow, pytest.mark.long]


def make_samples() -> list[Sample]:
    samples = []
    for number, length in enumerate((30, 17, 24, 21)):
        ids = torch.randint(3, 300, (length,), generator=torch.Generator().manual_seed(number))
        mask = [0, 0, 0, *[1] * (length - 3)]
        trajectory = make_trajectory(
            ids.tolist(),
            mask,
            logprobs=[-5.7] * sum(mask),
            group_id=f"g{number // 2}",
            member=number % 2,
        )
        samples.append(Sample(trajectory=trajectory, advantage=1.0 - 2.0 * (number % 2)))
    return samples


SCORED = [[5, 9, 17, 30, 41, 8, 77, 120, 6, 33, 250, 19]]


def trained(cfg: RunConfig) -> tuple[float, dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Return the gradient norm of a step, the weights after it, and scores before and after it."""
    with trainer_of(cfg) as (trainer, workers):
        before = torch.tensor(trainer.score(SCORED))
        norm = trainer.train_on(make_samples(), version=0).metrics["train/grad_norm"]
        after = torch.tensor(trainer.score(SCORED))
        return norm, tensors_of(trainer.live_weights(ask=workers.ask_for_part)), before, after


def test_two_ranks_in_bf16_train_vectors_as_one(tmp_path: Path) -> None:
    path = save_network("mamba2", tmp_path)
    learner = LearnerSection(
        device="cpu",
        precision=Precision.BF16,
        lr=1e-2,
        warmup_steps=0,
        rank_timeout_s=120.0,
        controller=ControllerSection(skip_step=False),  # The samples are far off-policy.
    )
    cfg = RunConfig(model=ModelSection(path=str(path), dtype="bfloat16"), learner=learner)
    norm, weights, before, after = trained(cfg)
    norm_of_two, weights_of_two, _, after_of_two = trained(
        replace(cfg, learner=replace(learner, num_ranks=2))
    )
    assert norm_of_two == pytest.approx(norm, rel=0.02)
    # The step changes the scores far more than rounding does.
    assert (after - before).abs().mean() > 5 * (after - after_of_two).abs().mean()
    assert weights.keys() == weights_of_two.keys()
    names = [name for name in weights if name.endswith(("A_log", "dt_bias", ".D"))]
    assert names
    for name in names:
        assert weights_of_two[name].dtype is torch.float32
        # A few gradients near zero have another sign, and Adam's first step another direction.
        differ = (weights[name] - weights_of_two[name]).abs() > 1e-3
        assert differ.float().mean() < 0.2, name


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt2"])
def test_two_ranks_in_bf16_publish_the_numbers_of_one(tmp_path: Path, family: str) -> None:
    path = save_network(family, tmp_path)
    still = ControllerSection(skip_step=False)
    learner = LearnerSection(
        device="cpu", precision=Precision.BF16, rank_timeout_s=120.0, controller=still
    )
    cfg = RunConfig(model=ModelSection(path=str(path), dtype="float32"), learner=learner)
    versions: list[dict[str, torch.Tensor]] = []
    for num_ranks in (1, 2):
        settings = replace(cfg, learner=replace(learner, num_ranks=num_ranks))
        with trainer_of(settings) as (trainer, workers):
            versions.append(tensors_of(trainer.live_weights(ask=workers.ask_for_part)))
            shown = trainer.train_on(make_samples(), version=0).metrics
            assert 0.9 < shown["train/vanished_update_frac"] <= 1.0
    alone, both = versions
    assert alone.keys() == both.keys()
    for name, each in alone.items():
        assert torch.equal(each, both[name]), name
        assert "norm" in name or "ln_" in name or torch.equal(each, each.bfloat16().float()), name
