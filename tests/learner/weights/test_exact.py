"""Laws of the tensors that engines in bf16 keep in fp32: they are sent without rounding."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM

from common.config.algorithm import AlgorithmSection
from common.config.learner import LearnerSection
from learner.policy.forward import Networks
from learner.policy.model import load_policy
from learner.policy.precision import stays_exact
from learner.training.step import TrainerSettings
from learner.training.trainer import Trainer
from learner.weights.source import policy_weights
from tests.learner.builders import make_model, make_model_with_adapters, tensors_of
from tests.learner.experts import save_experts

SIZES: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1}
THIRD = 1 / 3  # A number that bf16 rounds.


def sent(model: Any) -> dict[str, torch.dtype]:
    """Return the dtype of each tensor that an engine in bf16 receives."""
    with torch.no_grad():
        for each in (*model.parameters(), *model.buffers()):
            if each.is_floating_point():
                each.fill_(THIRD)
    tensors = tensors_of(policy_weights(model, torch.bfloat16))
    exact = {
        name for name, each in tensors.items() if bool((each.float() == torch.tensor(THIRD)).all())
    }
    assert {name for name, each in tensors.items() if each.dtype is torch.float32} == exact
    return {name: each.dtype for name, each in tensors.items()}


@pytest.mark.parametrize(
    ("shape", "is_exact"),
    [
        ([], True),
        ([64], True),
        ([1, 1, 64, 1], True),
        ([64, 2048], True),  # A router.
        ([8192, 16], True),  # Decay rates.
        ([8192, 1, 4], True),  # A convolution.
        ([8192, 32], False),
        ([2048, 64], False),
        ([64, 2048, 768], False),  # The weights of all experts.
    ],
)
def test_vectors_and_routers_stay_exact(shape: list[int], is_exact: bool) -> None:
    assert stays_exact(shape, [64]) is is_exact


def test_router_and_its_correction_are_sent_exactly(tmp_path: Path) -> None:
    save_experts(tmp_path, "deepseek_v3")
    dtypes = sent(load_policy(str(tmp_path), device="cpu"))
    routers = [name for name in dtypes if ".gate." in name]
    assert {name.rpartition(".")[2] for name in routers} == {"weight", "e_score_correction_bias"}
    assert {dtypes[name] for name in routers} == {torch.float32}
    experts = {each for name, each in dtypes.items() if ".experts." in name}
    assert experts == {dtypes["lm_head.weight"]} == {torch.bfloat16}


def test_decay_rates_and_convolutions_are_sent_exactly() -> None:
    mamba = MambaForCausalLM(MambaConfig(**SIZES, state_size=16))
    heads: dict[str, Any] = {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 32}
    mamba2 = Mamba2ForCausalLM(Mamba2Config(**SIZES, **heads))
    for model in (mamba, mamba2):
        dtypes = sent(model)
        own = {"A_log", "D", "conv1d.weight", "conv1d.bias"}
        exact = {name for name, each in dtypes.items() if each is torch.float32}
        prefix = "backbone.layers.0.mixer."
        assert {f"{prefix}{each}" for each in own} <= exact
        assert dtypes[f"{prefix}in_proj.weight"] is torch.bfloat16
        assert dtypes[f"{prefix}out_proj.weight"] is torch.bfloat16


def test_trainer_sends_exact_vectors() -> None:
    settings = TrainerSettings(
        learner=LearnerSection(), algorithm=AlgorithmSection(), num_steps=1, engine_dtype="bfloat16"
    )
    trainer = Trainer(settings, Networks(policy=make_model()))
    kinds = {each.name: each.dtype for each in trainer.live_weights().specs}
    assert kinds["model.norm.weight"] == "float32"
    assert kinds["model.layers.0.mlp.up_proj.weight"] == "bfloat16"


def test_adapters_are_sent_in_the_engines_dtype() -> None:
    assert set(sent(make_model_with_adapters()).values()) == {torch.bfloat16}
