"""Laws of AdamW's moments in 8 bits: the same training, a quarter of the memory, exact resume."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from common.config.algorithm import Advantage, AlgorithmSection
from common.config.learner import (
    ControllerSection,
    CriticKind,
    CriticSection,
    LearnerSection,
    LoraSection,
    Moments,
    Precision,
)
from common.config.load import load_config
from common.config.model import ModelSection
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.repository import ROOT
from learner.policy.sharding import shard
from learner.training.build import load_start, make_trainer
from learner.training.checkpoint import TENSORS, Checkpoints
from learner.training.optimizer import has_whole_blocks, make_optimizer
from learner.training.ranks import Ranks
from learner.training.state import StateWriter, live_tensors, restore
from learner.training.trainer import Trainer
from tests.learner.builders import VOCAB, make_samples
from tests.learner.policy.test_loading import rank_of
from tests.learner.training.test_rank_workers import ranks_of, weights_after
from tests.marks import long_for
from tools.checks.memory_plan import adamw_part


def wide_model(*, seed: int = 0, width: int = 64) -> Qwen3ForCausalLM:
    """Build a Qwen3 with matrices of whole blocks; its tables are not."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 2,
        intermediate_size=2 * width,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    return Qwen3ForCausalLM(config).train()


def loss_after(moments: Moments, *, num_steps: int) -> tuple[float, float]:
    """Return the loss of random sequences before and after training on them."""
    model: Any = wide_model()
    optimizer = make_optimizer(model, LearnerSection(lr=3e-3, moments=moments))
    tokens = torch.randint(0, VOCAB, (8, 24), generator=torch.Generator().manual_seed(1))
    losses = []
    for step in range(num_steps + 1):
        optimizer.set_lr_scale(min(1.0, (step + 1) / 5))
        loss = model(input_ids=tokens, labels=tokens).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses[0], losses[-1]


def test_the_same_loss_falls_as_with_fp32() -> None:
    start, exact = loss_after(Moments.FP32, num_steps=25)
    _, coarse = loss_after(Moments.INT8, num_steps=25)
    assert exact < 0.7 * start
    assert coarse - exact != 0.0  # they are other numbers
    assert abs(coarse - exact) < 0.02 * (start - exact)


@pytest.mark.parametrize("moments", list(Moments))
def test_configured_rates_equal_the_same_rates_set_later(moments: Moments) -> None:
    cfg = LearnerSection(moments=moments, lr=1e-3)
    optimizer = make_optimizer(wide_model(), cfg)

    def rates() -> list[float]:
        found: list[float] = []
        for scale in torch.linspace(0.1, 1, 50).tolist():
            optimizer.set_lr_scale(scale)
            found += [float(each.param_groups[0]["lr"]) for each in optimizer.optimizers]
        return found

    configured = rates()
    optimizer.set_rates(cfg.lr, cfg.muon_lr)
    assert rates() == configured


def bytes_of(tensor: Tensor) -> int:
    parts = [getattr(tensor, name, None) for name in ("codes", "scale", "qmap")]
    return sum(each.nbytes for each in parts if each is not None) or tensor.nbytes


@pytest.mark.parametrize("moments", list(Moments))
def test_moments_take_the_planned_memory(moments: Moments) -> None:
    model: Any = wide_model(width=256)
    optimizer = make_optimizer(model, LearnerSection(moments=moments))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    # The tables of 50 words are of whole blocks at this width, the norms are not.
    held = sum(
        bytes_of(value)
        for each in optimizer.optimizers
        for values in each.state.values()
        for value in values.values()
    )
    num = sum(each.numel() for each in model.parameters())
    assert held == pytest.approx(adamw_part(moments, num).num_bytes, rel=0.03)


def make_cfg(folder: Path, case: str, **learner: Any) -> RunConfig:
    if not (folder / "policy").exists():
        wide_model().save_pretrained(folder / "policy")
    algorithm = AlgorithmSection()
    if case == "lora":
        learner["lora"] = LoraSection(rank=32, alpha=32.0)
    if case == "critic":
        algorithm = AlgorithmSection(advantage=Advantage.PPO, kl_coef=0.01)
        learner["critic"] = CriticSection(kind=CriticKind.MODEL, lr=1e-3)
    section = LearnerSection(
        device="cpu",
        precision=Precision.FP32,
        warmup_steps=0,
        lr=1e-3,
        moments=Moments.INT8,
        num_minibatches=2,
        rank_timeout_s=60.0,
        controller=ControllerSection(skip_step=False),
        **learner,
    )
    model = ModelSection(path=str(folder / "policy"), dtype="float32")
    return RunConfig(model=model, learner=section, algorithm=algorithm)


def make(cfg: RunConfig, checkpoint: Path | None = None) -> Trainer:
    model, _ = load_start(cfg, checkpoint, torch.device("cpu"))
    return make_trainer(cfg, model, checkpoint)[0]


def save(trainer: Trainer, folder: Path, cfg: RunConfig, *, version: int) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "configs/policies/tiny", local_files_only=True)
    checkpoints = Checkpoints(folder, cfg.learner)
    saved = checkpoints.save(version, model=trainer._model, tokenizer=tokenizer, trainer=trainer)
    checkpoints.wait()
    return saved


def local_values(trainer: Trainer) -> dict[str, Tensor]:
    return {
        name: (each.to_local() if isinstance(each, DTensor) else each).detach().clone()
        for name, each in trainer.tensors().items()
    }


@pytest.mark.parametrize("case", long_for(["plain", "lora", "critic"], ["plain"]))
def test_resumed_run_continues_bit_for_bit(case: str, tmp_path: Path) -> None:
    cfg = make_cfg(tmp_path, case)
    first = make(cfg)
    for step in range(2):
        first.train_on(make_samples(seed=step), version=step)
    before = local_values(first)
    folder = save(first, tmp_path / "checkpoints", cfg, version=2)
    again = make(cfg, folder)
    prefixes = ("optimizer.model.", "optimizer.critic.")[: 2 if case == "critic" else 1]
    for prefix in prefixes:
        assert any(name.startswith(prefix) and name.endswith(".codes") for name in before)
    for trainer in (first, again):
        trainer.train_on(make_samples(seed=5), version=2)
    after, resumed = local_values(first), local_values(again)
    assert resumed.keys() == after.keys()
    assert [name for name in after if not torch.equal(after[name], resumed[name])] == []
    assert any(not torch.equal(before[name], after[name]) for name in after)


def test_moments_of_another_kind_are_refused(tmp_path: Path) -> None:
    cfg = make_cfg(tmp_path, "plain")
    trainer = make(cfg)
    trainer.train_on(make_samples(), version=0)
    folder = save(trainer, tmp_path / "checkpoints", cfg, version=1)
    other = replace(cfg, learner=replace(cfg.learner, moments=Moments.FP32))
    with pytest.raises(ConfigError, match=r"learner\.moments of the checkpoint"):
        make(other, folder)
    assert (folder / TENSORS).exists()


def test_muon_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"learner\.moments='8bit': must be fp32 with learner"):
        load_config("smoke", ["learner.optimizer=muon", "learner.moments=8bit"])


def give_moments(model: Any, *, seed: int) -> list[torch.optim.Optimizer]:
    """Make an update with a random gradient; return the optimizers."""
    optimizer = make_optimizer(model, LearnerSection(lr=1e-2, moments=Moments.INT8))
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()
    return optimizer.optimizers


@pytest.mark.parametrize("size", [1, 4, pytest.param(2, marks=pytest.mark.long)])
def test_several_ranks_read_the_moments_of_one(size: int, tmp_path: Path) -> None:
    model = wide_model(seed=1, width=256)
    written = live_tensors({"model": model}, give_moments(model, seed=3))
    written = {name: each.detach() for name, each in written.items()}
    StateWriter(Ranks()).start(written, tmp_path / "state").result(60)
    other = wide_model(seed=2, width=256)
    with rank_of(size) as mesh:
        shard(other, mesh, dtype=torch.float32)
        assert sum(map(has_whole_blocks, other.parameters())) >= 14
        cfg = LearnerSection(lr=1e-2, moments=Moments.INT8)
        optimizers = make_optimizer(other, cfg).optimizers
        if size == 4:  # The last part of its tables is too small.
            assert {name for name in written if "embed" in name and name.endswith("codes")}
            with pytest.raises(ConfigError, match=r"8bit moments, learner\.num_ranks must"):
                restore(tmp_path / "state", {"model": other}, optimizers)
            return
        restore(tmp_path / "state", {"model": other}, optimizers)
        tensors = live_tensors({"model": other}, optimizers)
        assert tensors.keys() == written.keys()
        for name, part in tensors.items():
            want, local = written[name], part.detach()
            if isinstance(local, DTensor):
                assert local.shape == want.shape, name
                local, want = local.to_local(), want[: -(-len(want) // size)]
            assert torch.equal(local, want), name


@pytest.mark.long
@pytest.mark.slow
def test_two_ranks_train_like_one(tmp_path: Path) -> None:
    wide_model(width=256).save_pretrained(tmp_path / "policy")  # Its halves are whole blocks, too.
    cfg = make_cfg(tmp_path, "plain", num_ranks=2)
    AutoTokenizer.from_pretrained(ROOT / "configs/policies/tiny").save_pretrained(
        tmp_path / "policy"
    )
    alone = replace(cfg, learner=replace(cfg.learner, num_ranks=1))
    expected = weights_after(make(alone), num_steps=3)
    with ranks_of(cfg) as (trainer, _):
        weights = weights_after(trainer, num_steps=3)
        folder = save(trainer, tmp_path / "checkpoints", cfg, version=3)
        kept = local_values(trainer)
        onward = weights_after(trainer, num_steps=1)
    assert sum(name.endswith(".codes") for name in kept) == 2 * (2 + 14)  # tables and layers
    assert (weights - expected).abs().max() < 2e-3  # Three updates change at most 1e-3 each.
    assert (weights - expected).abs().mean() < 2e-5
    with ranks_of(cfg, folder) as (trainer, _):
        again = local_values(trainer)
        assert [name for name in kept if not torch.equal(kept[name], again[name])] == []
        assert torch.equal(weights_after(trainer, num_steps=1), onward)
    with ranks_of(alone, folder) as (trainer, _):
        assert (weights_after(trainer, num_steps=1) - onward).abs().mean() < 2e-5
