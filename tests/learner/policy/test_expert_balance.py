"""Laws of the routers' load-balancing loss."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from common.config.algorithm import AlgorithmSection
from common.config.learner import Activations, Layout, LearnerSection, Precision
from common.errors import ConfigError
from learner.batch.batching import Sample, collate_tokens
from learner.policy.forward import Networks, Passes
from learner.policy.model import load_policy
from learner.training.step import BALANCE_METRIC, TrainerSettings
from learner.training.trainer import Trainer
from tests.learner.builders import make_model, make_trajectory
from tests.learner.experts import VOCAB, save_experts

CHOSEN = 2
EXPERTS = {"qwen3_moe": 8, "mixtral": 4, "gpt_oss": 4}


def sequences_of(*lengths: int) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [draw.integers(3, VOCAB, length) for length in lengths]


@torch.no_grad()
def logits_of(path: Path, sequences: list[np.ndarray]) -> list[Tensor]:
    """Return each layer's logits [token, expert] of all sequences, computed one by one."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    rows = [
        model(torch.from_numpy(sequence)[None], output_router_logits=True).router_logits
        for sequence in sequences
    ]
    return [torch.cat([each[layer] for each in rows]) for layer in range(2)]


def loss_by_hand(layers: list[Tensor]) -> float:
    """Return E * sum over experts of (share of tokens that choose it * its mean probability)."""
    probs = torch.cat(layers).softmax(-1)
    chosen = F.one_hot(probs.topk(CHOSEN).indices, probs.shape[-1]).sum(1).float()
    return (probs.shape[-1] * (chosen.mean(0) * probs.mean(0)).sum()).item()


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("qwen3_moe", Layout.PADDED),
        ("qwen3_moe", Layout.PACKED),
        ("mixtral", Layout.PACKED),
        ("gpt_oss", Layout.PADDED),
    ],
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_balance_loss_counts_real_tokens_only(
    tmp_path: Path, kind: str, layout: Layout, checkpointing: bool
) -> None:
    save_experts(tmp_path, kind)
    sequences = sequences_of(600, 23, 31)  # A packed row is filled up to a multiple of 64.
    expected = loss_by_hand(logits_of(tmp_path, sequences))
    logits: Any = tuple(logits_of(tmp_path, sequences))
    theirs = load_balancing_loss_func(logits, EXPERTS[kind], CHOSEN)
    assert expected == pytest.approx(float(theirs), rel=1e-5)
    model = load_policy(str(tmp_path), device="cpu")
    cfg = LearnerSection(
        device="cpu",
        precision=Precision.FP32,
        layout=layout,
        activations=Activations.RECOMPUTE if checkpointing else Activations.KEEP,
    )
    passes = Passes(cfg, Networks(policy=model), temperature=1.0, engine_dtype="float32")
    masks = [np.arange(len(each)) > 0 for each in sequences]
    tokens = collate_tokens(sequences, masks, device="cpu", is_packed=passes.is_packed)
    found = passes.score(tokens, with_balance=True).balance
    assert found is not None
    assert found.item() == pytest.approx(expected, rel=1e-5)
    found.backward()
    gates = [
        p.grad for n, p in model.named_parameters() if n.endswith(("gate.weight", "router.weight"))
    ]
    assert all(each is not None and each.abs().max() > 0 for each in gates)


def trainer_of(path: Path, **algorithm: Any) -> Trainer:
    settings = TrainerSettings(
        learner=LearnerSection(device="cpu", precision=Precision.FP32, warmup_steps=0, lr=1e-2),
        algorithm=AlgorithmSection(**algorithm),
        num_steps=100,
        engine_dtype="float32",
    )
    model = load_policy(str(path), device="cpu")
    return Trainer(settings, Networks(policy=model))


def test_training_on_the_balance_loss_lowers_it(tmp_path: Path) -> None:
    save_experts(tmp_path, "qwen3_moe")
    sequences = sequences_of(40, 33)
    samples = [
        Sample(
            trajectory=make_trajectory(sequence.tolist(), [0] * 10 + [1] * (len(sequence) - 10)),
            advantage=0.0,
        )
        for sequence in sequences
    ]
    expected = loss_by_hand(logits_of(tmp_path, sequences))
    trainer = trainer_of(tmp_path, router_aux_coef=1.0)
    steps = [trainer.train_on(samples, version=n, must_train=True) for n in range(8)]
    found = [step.metrics[BALANCE_METRIC] for step in steps]
    assert found[0] == pytest.approx(expected, rel=1e-5)
    assert found[-1] < found[0] - 0.02
    step = trainer_of(tmp_path).train_on(samples, version=0, must_train=True)
    assert BALANCE_METRIC not in step.metrics


def test_balance_loss_of_a_dense_model_is_refused(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"no load-balancing loss for Qwen3ForCausalLM.*coef=0"):
        trainer_of(tmp_path, router_aux_coef=0.1)
