"""Law: settings of learning without an effect on a training step have their own effect."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.config.algorithm import Advantage, AlgorithmSection, Correction
from common.config.learner import Activations, ControllerSection, CriticKind, CriticSection
from common.config.run_config import RunConfig
from common.errors import ConfigError
from learner.policy.finite import TrainingDiverged
from learner.training.build import load_start, make_trainer
from learner.training.checkpoint import Checkpoints
from tests.learner.builders import make_model, make_samples, run_config_with_policy


@pytest.fixture
def cfg(tmp_path: Path) -> RunConfig:
    make_model(seed=5).save_pretrained(tmp_path / "other")
    quiet = ControllerSection(scale_lr=False, skip_step=False)
    return run_config_with_policy(tmp_path, controller=quiet)


def loss_of(cfg: RunConfig) -> float:
    model, _ = load_start(cfg, None, torch.device("cpu"))
    return (
        make_trainer(cfg, model, None)[0]
        .train_on(make_samples(), version=0)
        .metrics["train/grad_norm"]
    )


def learner(cfg: RunConfig, **changes: Any) -> RunConfig:
    return replace(cfg, learner=replace(cfg.learner, **changes))


def algorithm(cfg: RunConfig, **changes: Any) -> RunConfig:
    return replace(cfg, algorithm=replace(cfg.algorithm, **changes))


def num_recomputed(cfg: RunConfig) -> int:
    """Return the number of layers that recompute their activations."""
    model, _ = load_start(cfg, None, torch.device("cpu"))
    make_trainer(cfg, model, None)
    return sum(bool(getattr(each, "gradient_checkpointing", 0)) for each in model.modules())


def num_threads(cfg: RunConfig) -> int:
    load_start(cfg, None, torch.device("cpu"))
    return torch.get_num_threads()


def num_bad_steps(cfg: RunConfig) -> int:
    """Return in which bad step the run ended."""
    model, _ = load_start(cfg, None, torch.device("cpu"))
    trainer, _ = make_trainer(cfg, model, None)
    samples = make_samples()
    samples[0].trajectory.logprobs[:] = torch.nan
    for step in range(9):
        try:
            trainer.train_on(samples, version=step)
        except TrainingDiverged:
            return step
    return -1


def due_after(cfg: RunConfig) -> list[bool]:
    keeper = Checkpoints(Path("nowhere"), cfg.learner)
    return [keeper.is_due(version) for version in (1, 2, 3)]


@pytest.mark.parametrize(
    ("seen", "changes"),
    [
        (num_recomputed, {"activations": Activations.RECOMPUTE}),
        (num_threads, {"num_threads": 2}),
        (num_bad_steps, {"max_bad_steps": 2}),
        (due_after, {"checkpoint_every_steps": 2}),
        (due_after, {"checkpoint_every_s": 1e-9}),
    ],
)
def test_learner_setting_has_its_effect(
    cfg: RunConfig, seen: Callable[[RunConfig], Any], changes: dict[str, Any]
) -> None:
    threads = torch.get_num_threads()
    try:
        assert seen(cfg) != seen(learner(cfg, **changes))
    finally:
        torch.set_num_threads(threads)


def test_reference_is_loaded_from_its_path_only_if_used(cfg: RunConfig, tmp_path: Path) -> None:
    near = loss_of(algorithm(cfg, kl_coef=0.5))
    far = loss_of(algorithm(cfg, kl_coef=0.5, reference_path=str(tmp_path / "other")))
    assert near != far
    missing = str(tmp_path / "missing")
    assert loss_of(algorithm(cfg, reference_path=missing)) == loss_of(cfg)
    with pytest.raises(ConfigError, match="missing"):
        loss_of(algorithm(cfg, kl_coef=0.5, reference_path=missing))


def test_separate_critic_is_loaded_from_path(cfg: RunConfig, tmp_path: Path) -> None:
    cfg = replace(cfg, algorithm=AlgorithmSection(advantage=Advantage.PPO))

    def trunk_of(critic: CriticSection) -> torch.Tensor:
        own = learner(cfg, critic=critic)
        model, _ = load_start(own, None, torch.device("cpu"))
        tensors = make_trainer(own, model, None)[0].tensors()
        return tensors["critic.trunk.embed_tokens.weight"]

    plain = trunk_of(CriticSection(kind=CriticKind.MODEL))
    other = trunk_of(CriticSection(kind=CriticKind.MODEL, path=str(tmp_path / "other")))
    assert not plain.equal(other)


def test_many_masked_tokens_are_warned_of(cfg: RunConfig, caplog: pytest.LogCaptureFixture) -> None:
    cfg = algorithm(cfg, correction=Correction.ICEPOP, mask_low=0.99, mask_high=1.01)
    loss_of(cfg)
    assert "correction masks many tokens" in caplog.text
    caplog.clear()
    loss_of(learner(cfg, controller=replace(cfg.learner.controller, masked_warn_frac=1.0)))
    assert "correction masks many tokens" not in caplog.text
