"""Laws of the presets of large models: each trains a small random one of its own architecture."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from common.config.algorithm import Advantage
from common.config.learner import Activations, Offload
from common.config.load import list_configs, load_config
from common.config.run_config import RunConfig
from common.repository import ROOT
from learner.policy.lora import has_adapters
from learner.training.trainer import Trainer
from tests.learner.builders import VOCAB, make_samples
from tests.learner.training.test_rank_workers import ranks_of

SHRINK = 32  # times narrower than the model that the preset is for
NUM_EXPERTS = 4
# The presets of other tasks differ in no key of the learner's networks.
PRESETS = [
    name
    for name in list_configs()
    if "qwen" in name and not (name.startswith("babyai") and "qwen3" in name)
]
HERE = (
    *("learner.device=cpu", "learner.num_gpus=0", "learner.num_ranks=1", "actor.num_gpus=0"),
    *("learner.lr=1e-3", "learner.warmup_steps=0", "learner.precision=fp32"),
)
CASES = [
    *((name, ()) for name in PRESETS),
    ("textcraft-qwen7b", ("learner.moments=8bit", "algorithm.advantage=ppo")),
    ("textcraft-qwen7b", ("algorithm.advantage=ppo", "learner.critic.kind=model")),
    ("textcraft-qwen7b-lora", ("learner.moments=8bit", "learner.precision=bf16")),
]


def save_small(architecture: Path, folder: Path) -> None:
    """Save random weights for an architecture of two layers, much narrower, of few words."""
    told = json.loads((architecture / "config.json").read_text(encoding="utf-8"))
    for key in ("hidden_size", "intermediate_size", "moe_intermediate_size"):
        if key in told:
            told[key] //= SHRINK
    if "num_experts" in told:
        told |= {"num_experts": NUM_EXPERTS, "num_experts_per_tok": NUM_EXPERTS // 2}
    if "head_dim" in told:
        told["head_dim"] = 16
    # As many queries to a key, as in the large one; heads of 16 numbers.
    heads = told["hidden_size"] // 16
    told["num_key_value_heads"] = max(
        1, heads * told["num_key_value_heads"] // told["num_attention_heads"]
    )
    told |= {"num_attention_heads": heads, "num_hidden_layers": 2, "vocab_size": VOCAB}
    told |= {"bos_token_id": 0, "eos_token_id": 1, "max_window_layers": 2}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(told), encoding="utf-8")
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model.float().save_pretrained(folder)


def load_small(name: str, folder: Path, overrides: tuple[str, ...]) -> RunConfig:
    large = load_config(name, [], is_dry=True)
    save_small(ROOT / large.model.architecture, folder)
    if large.learner.offload is Offload.OPTIMIZER:  # found where there is no GPU
        overrides = (*overrides, "learner.device=auto")
    given = {line.partition("=")[0] for line in overrides}
    here = [line for line in HERE if line.partition("=")[0] not in given]
    return load_config(name, [f"model.path={folder}", *here, *overrides])


# Presets whose learner differs from another one's in the task, or in sizes that are too large here.
REPEATED = [
    "babyai-qwen7b",
    "searchqa-qwen7b",
    "webarena-qwen7b",
    "textcraft-qwen7b-2nodes",
    "sciworld-qwen7b",
    "textcraft-qwen3-4b",  # The one of 0.6B has tied weights, too.
    "textcraft-qwen3-14b-lora",
    "textcraft-qwen3-8b-lora",
    *(name for name in PRESETS if name.startswith("dataset-qwen3-")),
]


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        pytest.param(
            *case,
            marks=[pytest.mark.long] * (case[0] in REPEATED),
            id=" ".join([case[0], *case[1]]),
        )
        for case in CASES
    ],
)
def test_preset_trains_small_model_of_architecture(
    name: str, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    cfg = load_small(name, tmp_path / "policy", overrides)
    with ranks_of(cfg) as (trainer, _):
        check_learning(trainer, cfg, is_lora="lora" in name)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a parameter, sharded or not."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def check_learning(trainer: Trainer, cfg: RunConfig, *, is_lora: bool) -> None:
    """Train two steps; the trained tokens must improve."""
    model: Any = trainer._gradients._networks.policy
    (architecture,) = model.config.architectures
    assert architecture in type(model).__name__
    is_recomputing = cfg.learner.activations is Activations.RECOMPUTE
    assert model.is_gradient_checkpointing == is_recomputing
    assert has_adapters(model) == is_lora
    assert isinstance(next(model.parameters()), DTensor) == (
        cfg.learner.offload is Offload.OPTIMIZER
    )
    before = {key: whole(each) for key, each in model.named_parameters()}
    samples = make_samples(num_groups=8)
    tokens = [sample.trajectory.token_ids.tolist() for sample in samples]
    start = trainer.score(tokens)
    for step in range(2):
        metrics = trainer.train_on(samples, version=step, must_train=True).metrics
    assert trainer.values()["num_updates"] == 2 * cfg.learner.num_minibatches
    is_trained = {key: each.requires_grad for key, each in model.named_parameters()}
    changed = {k: not torch.equal(before[k], whole(v)) for k, v in model.named_parameters()}
    assert changed == is_trained  # all that is to learn, nothing else
    assert any(is_trained.values())
    if cfg.algorithm.kl_coef:
        assert metrics["policy/kl_reference"] > 0  # the reference is where the run began
    if cfg.algorithm.advantage is Advantage.PPO:
        assert metrics["critic/grad_norm"] > 0
        return  # its advantages are the critic's
    gains = [
        (sum(now) - sum(then)) * sample.advantage
        for sample, now, then in zip(samples, trainer.score(tokens), start, strict=True)
    ]
    assert sum(gains) > 0  # Good tokens are likelier, bad ones less likely.
