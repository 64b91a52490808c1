"""Trains on a batch of episodes with many segments, and prints measured and planned bytes.

The process is its own, so that its largest resident memory is that of the step.
"""

import gc
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from common.config.actor import ActorSection
from common.config.learner import Attention, ControllerSection, Layout, LearnerSection, Precision
from common.config.model import ModelSection
from common.config.run_config import RunConfig
from common.wire.messages import Trajectory
from learner.batch.batching import Sample
from learner.policy.model_shape import read_shape
from learner.training.build import load_start, make_trainer
from tests.learner.policy.peak_of_row import VOCAB, status
from tools.checks.memory_plan import learner_host_parts, learner_parts
from tools.simulator.workload import synthetic_trajectory

TURN = 100  # Tokens of a turn; the last ten are sampled.
CONTEXT = 1_000
PER_SEGMENT = CONTEXT // TURN  # Turns of a segment.


def episode(num_turns: int, member: int) -> Trajectory:
    """Return an episode whose context begins again after every `PER_SEGMENT` turns."""
    places = np.arange(num_turns * TURN)
    mask = places % TURN >= TURN - 10
    rng = np.random.default_rng(member)
    return synthetic_trajectory(
        rng.integers(0, VOCAB, len(places)),
        mask,
        group_id="g",
        member=member,
        num_turns=num_turns,
        logprobs=np.where(mask, -6.0, 0.0).astype(np.float32),
        turn_ids=(places // TURN).astype(np.int32),
        invalid_turns=np.zeros(num_turns, dtype=np.bool_),
        turn_scores=np.zeros(num_turns, dtype=np.float32),
        segment_starts=np.arange(0, len(places), CONTEXT, dtype=np.int32),
    )


def samples_of(num_episodes: int, num_turns: int) -> list[Sample]:
    """Return a batch of episodes with alternating advantages."""
    return [
        Sample(trajectory=episode(num_turns, member), advantage=1.0 - 2 * (member % 2))
        for member in range(num_episodes)
    ]


def main(folder: Path, num_episodes: int, num_turns: int, microbatch: int) -> None:
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=CONTEXT,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)
    learner = LearnerSection(
        device="cpu",
        num_threads=1,
        precision=Precision.FP32,
        layout=Layout.PACKED,
        attention=Attention.FUSED,
        max_tokens_per_microbatch=microbatch,
        controller=ControllerSection(skip_step=False),
    )
    actor = replace(ActorSection(), max_model_len=CONTEXT)
    cfg = RunConfig(
        model=ModelSection(path=str(folder), dtype="float32"), learner=learner, actor=actor
    )
    network, _ = load_start(cfg, None, torch.device("cpu"))
    trainer, _ = make_trainer(cfg, network, None)
    trainer.train_on(samples_of(1, PER_SEGMENT), version=0)
    batch = samples_of(num_episodes, num_turns)
    num_tokens = sum(len(sample.trajectory.token_ids) for sample in batch)
    gc.collect()
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    result = trainer.train_on(batch, version=1)
    assert not result.decision.is_skipped
    parts = learner_parts(cfg, read_shape(folder), is_cuda=False, rank=1)
    parts += learner_host_parts(cfg, read_shape(folder), is_cuda=False)
    labels = ("activations", "layer inputs", "logits", "gradients")
    sizes = {
        "measured": status("VmHWM") - before,
        "planned": sum(part.num_bytes for part in parts if part.label in labels),
        "tokens": num_tokens,
    }
    sys.stdout.write(json.dumps(sizes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
