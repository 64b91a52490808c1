"""Laws of training adapters: with every kind of critic and reference, stopped and started again."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.config.algorithm import Advantage, AlgorithmSection
from common.config.learner import (
    Activations,
    ControllerSection,
    CriticKind,
    CriticSection,
    LoraSection,
)
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.repository import ROOT
from common.store.run_dir import RunDir
from learner.policy.lora import trained_state
from learner.training.build import load_start, make_trainer
from learner.training.checkpoint import TENSORS, Checkpoints
from learner.training.state import read_weights
from learner.training.trainer import Trainer
from tests.learner.builders import make_model, make_samples, run_config_with_policy
from tools.offline.merge import merge

CPU = torch.device("cpu")
TOKENIZER: Any = AutoTokenizer.from_pretrained(ROOT / "configs/policies/tiny")
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo, several updates": ({}, {"ppo_epochs": 2, "num_minibatches": 2}),
    "reference, checkpointed": ({"kl_coef": 0.1}, {"activations": Activations.RECOMPUTE}),
    "value head": ({"advantage": Advantage.PPO}, {}),
    "critic of its own": (
        {"advantage": Advantage.PPO, "kl_coef": 0.1},
        {"critic": CriticSection(kind=CriticKind.MODEL)},
    ),
}


def config(folder: Path, case: str = "grpo, several updates", **lora: Any) -> RunConfig:
    algorithm, learner = CASES[case]
    settings = {"lr": 1e-2, "controller": ControllerSection(skip_step=False), **learner}
    cfg = run_config_with_policy(folder, lora=LoraSection(**{"rank": 4, **lora}), **settings)
    return replace(cfg, algorithm=AlgorithmSection(**algorithm))


def start(cfg: RunConfig, checkpoint: Path | None = None) -> tuple[Trainer, Any]:
    model, _ = load_start(cfg, checkpoint, CPU)
    return make_trainer(cfg, model, checkpoint)[0], model


def save(cfg: RunConfig, trainer: Trainer, model: Any, *, version: int) -> Path:
    checkpoints = Checkpoints(Path(cfg.model.path).parent / "checkpoints", cfg.learner)
    folder = checkpoints.save(version, model=model, tokenizer=TOKENIZER, trainer=trainer)
    checkpoints.wait()
    return folder


@pytest.mark.parametrize("case", CASES)
def test_restored_adapters_continue_bit_for_bit(tmp_path: Path, case: str) -> None:
    cfg = config(tmp_path, case)
    trainer, model = start(cfg)
    base = {name: each.clone() for name, each in make_model().named_parameters()}
    for version in range(2):
        trainer.train_on(make_samples(), version=version)
    again, restored = start(cfg, save(cfg, trainer, model, version=2))
    for each in (trainer, again):
        each.train_on(make_samples(seed=1), version=2)
    ours, theirs = trained_state(model), trained_state(restored)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert any(each.abs().max() > 1e-6 for name, each in ours.items() if "lora_B" in name)
    for name, each in model.named_parameters():
        assert each.requires_grad or torch.equal(each, base[name.replace(".base_layer", "")])


def test_adapter_checkpoint_excludes_the_base(tmp_path: Path) -> None:
    cfg = config(tmp_path)
    trainer, model = start(cfg)
    trainer.train_on(make_samples(), version=0)
    folder = save(cfg, trainer, model, version=1)
    num_trained = sum(each.numel() for each in trained_state(model).values())
    kept = dict(read_weights(folder / TENSORS, "model"))
    assert kept.keys() == trained_state(model).keys()
    assert sum(each.numel() for each in kept.values()) == num_trained
    assert (folder / "adapter_model.safetensors").stat().st_size > 4 * num_trained
    assert not (folder / "model.safetensors").exists()


def test_reference_is_the_base_without_a_second_network(tmp_path: Path) -> None:
    cfg = config(tmp_path, "reference, checkpointed")
    trainer, _ = start(cfg)
    trainer.train_on(make_samples(), version=0)
    networks = trainer._gradients._networks
    assert networks.reference is None
    assert networks.has_reference
    other = replace(
        cfg, algorithm=replace(cfg.algorithm, reference_path=str(tmp_path / "elsewhere"))
    )
    make_model(seed=3).save_pretrained(tmp_path / "elsewhere")
    assert start(other)[0]._gradients._networks.reference is not None


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"rank": 0}, r"lora\.rank=0: .* holds adapters"),
        ({"rank": 8}, "r=4, but this run has r=8"),
        ({"alpha": 8.0}, r"lora_alpha=32\.0, but this run has lora_alpha=8\.0"),
        ({"targets": ["q_proj"]}, "target_modules="),
    ],
)
def test_adapters_unlike_the_checkpoints_are_refused(
    tmp_path: Path, lora: dict[str, Any], said: str
) -> None:
    cfg = config(tmp_path)
    trainer, model = start(cfg)
    folder = save(cfg, trainer, model, version=1)
    changed = replace(cfg.learner.lora, **lora)
    with pytest.raises(ConfigError, match=said):
        start(replace(cfg, learner=replace(cfg.learner, lora=changed)), folder)


def test_adapters_refuse_checkpoint_of_whole_weights(tmp_path: Path) -> None:
    cfg = config(tmp_path, rank=0)
    folder = save(cfg, *start(cfg), version=1)
    lora = replace(cfg.learner, lora=LoraSection(rank=4))
    with pytest.raises(ConfigError, match=r"lora\.rank=4: .* holds whole weights"):
        start(replace(cfg, learner=lora), folder)


def test_merged_policy_equals_the_learners(tmp_path: Path) -> None:
    cfg = config(tmp_path)
    run_dir = RunDir(root=tmp_path / "run")
    with pytest.raises(ConfigError, match="has no checkpoint with adapters"):
        merge(cfg, run_dir)
    TOKENIZER.save_pretrained(cfg.model.path)
    trainer, model = start(cfg)
    for version in range(3):
        trainer.train_on(make_samples(), version=version)
    saved = save(cfg, trainer, model, version=3)
    shutil.copytree(saved, run_dir.checkpoints / saved.name)
    assert merge(cfg, run_dir) == 0
    ids = torch.arange(9)[None]
    with torch.no_grad():
        ours = model(input_ids=ids).logits
        plain = AutoModelForCausalLM.from_pretrained(
            run_dir.root / "policy", attn_implementation="eager"
        )
        torch.testing.assert_close(plain(input_ids=ids).logits, ours, atol=1e-5, rtol=1e-5)
        base = make_model()(input_ids=ids).logits
    assert (base - ours).abs().max() > 1e-2
