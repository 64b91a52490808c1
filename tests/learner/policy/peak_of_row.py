"""Trains on one long row and prints the measured and the planned memory in bytes.

The process is its own, so that its largest resident memory is that of the row.
"""

import gc
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from common.config.actor import ActorSection
from common.config.learner import (
    Activations,
    Attention,
    ControllerSection,
    Layout,
    LearnerSection,
    LoraSection,
    Precision,
)
from common.config.model import ModelSection
from common.config.run_config import RunConfig
from learner.batch.batching import Sample
from learner.policy.model_shape import read_shape
from learner.training.build import load_start, make_trainer
from tests.learner.builders import make_trajectory
from tools.checks.memory_plan import learner_host_parts, learner_parts

VOCAB = 512


def sample_of(length: int) -> Sample:
    ids = [(7 * number) % VOCAB for number in range(length)]
    trajectory = make_trajectory(ids, [0, *[1] * (length - 1)])
    return Sample(trajectory=trajectory, advantage=1.0)


def status(name: str) -> int:
    """Return a size of this process in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) << 10


def save_policy(
    folder: Path, *, hidden_size: int, intermediate_size: int, most: int, vocab_size: int = VOCAB
) -> None:
    """Write a random policy of two layers for contexts of `most` tokens."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=most,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)


def peaks_of_step(
    learner: LearnerSection,
    folder: Path,
    *,
    most: int,
    first: Sequence[Sample],
    batch: Sequence[Sample],
) -> dict[str, int]:
    """Return the measured and the planned bytes of a step of the policy in a folder.

    Args:
        most: tokens of the longest context.
        first: the batch of an earlier step, which allocates what remains.
    """
    actor = replace(ActorSection(), max_model_len=most)
    dtype = "bfloat16" if learner.precision is Precision.BF16 else "float32"
    model = ModelSection(path=str(folder), dtype=dtype)
    cfg = RunConfig(model=model, learner=learner, actor=actor)
    network, _ = load_start(cfg, None, torch.device("cpu"))
    trainer, _ = make_trainer(cfg, network, None)
    trainer.train_on(first, version=0)
    gc.collect()
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    result = trainer.train_on(batch, version=1)
    assert not result.decision.is_skipped
    parts = learner_parts(cfg, read_shape(folder), is_cuda=False, rank=1)
    parts += learner_host_parts(cfg, read_shape(folder), is_cuda=False)
    labels = ("activations", "layer inputs", "logits", "gradients")
    planned = sum(part.num_bytes for part in parts if part.label in labels)
    return {"measured": status("VmHWM") - before, "planned": planned}


def main(
    folder: Path,
    num_tokens: int,
    activations: str,
    gib: float,
    precision: str,
    rank: int,
    vocab_size: int,
) -> None:
    save_policy(
        folder, hidden_size=256, intermediate_size=1024, most=num_tokens, vocab_size=vocab_size
    )
    learner = LearnerSection(
        device="cpu",
        num_threads=1,
        precision=Precision(precision),
        layout=Layout.PACKED,
        attention=Attention.FUSED,
        activations=Activations(activations),
        activation_gib=gib,
        max_tokens_per_microbatch=num_tokens,
        controller=ControllerSection(skip_step=False),
        lora=LoraSection(rank=rank),
    )
    row = sample_of(num_tokens)
    peaks = peaks_of_step(learner, folder, most=num_tokens, first=[sample_of(64)], batch=[row])
    sys.stdout.write(json.dumps(peaks))


if __name__ == "__main__":
    folder, num_tokens, activations, gib, precision, rank, vocab_size = sys.argv[1:]
    main(
        Path(folder),
        int(num_tokens),
        activations,
        float(gib),
        precision,
        int(rank),
        int(vocab_size),
    )
