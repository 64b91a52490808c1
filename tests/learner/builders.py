"""Small trajectories and models for the learner's tests."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from common.config.algorithm import AlgorithmSection
from common.config.learner import (
    Activations,
    ControllerSection,
    LearnerSection,
    LoraSection,
    Precision,
    Rounding,
)
from common.config.model import ModelSection
from common.config.run_config import RunConfig
from common.weights.buckets import views
from common.wire.messages import EndReason, Trajectory
from learner.batch.batching import MicroBatch, Sample, each_microbatch
from learner.ingest.buffer import GroupAssembly
from learner.policy.activation_plan import StoredLayers
from learner.policy.activations import use_activations
from learner.policy.forward import Networks
from learner.policy.lora import add_adapters
from learner.training.step import TrainerSettings
from learner.training.trainer import Trainer
from learner.weights.source import LiveWeights, PublishedWeights, WeightSource, copied
from tools.simulator.workload import synthetic_trajectory

VOCAB = 50


def make_trajectory(
    token_ids: list[int],
    loss_mask: list[int],
    *,
    logprobs: list[float] | None = None,
    version: int = 0,
    group_id: str = "g0",
    member: int = 0,
    **changes: Any,
) -> Trajectory:
    """Build a trajectory; `logprobs` has one entry per sampled token, -1.0 by default."""
    full = np.zeros(len(token_ids), dtype=np.float32)
    full[np.array(loss_mask, dtype=bool)] = -1.0 if logprobs is None else logprobs
    return synthetic_trajectory(
        token_ids,
        loss_mask,
        group_id=group_id,
        member=member,
        version=version,
        logprobs=full,
        **changes,
    )


def make_episode(
    versions: list[int], *, name: str = "g0000000", member: int = 0, seed: int = 0
) -> Trajectory:
    """An episode of a prompt, and of two sampled tokens and one observed token for each turn."""
    rng = np.random.default_rng(seed)
    num = 1 + 3 * len(versions)
    turns = np.array([0, *(turn for turn in range(len(versions)) for _ in range(3))], np.int32)
    mask = np.array([False, *[True, True, False] * len(versions)])
    whole = make_trajectory(
        rng.integers(0, 50, size=num).tolist(),
        mask.astype(int).tolist(),
        group_id=name,
        member=member,
    )
    of_tokens = np.where(mask, np.array(versions, np.int32)[turns], -1).astype(np.int32)
    return replace(
        whole,
        versions=of_tokens,
        turn_ids=turns,
        num_turns=len(versions),
        invalid_turns=np.zeros(len(versions), dtype=np.bool_),
        turn_scores=np.zeros(len(versions), dtype=np.float32),
        num_invalid_actions=0,
    )


def so_far(whole: Trajectory, num_turns: int) -> Trajectory:
    """The first turns of an episode, as its actor sends them while it runs."""
    num = 1 + 3 * num_turns
    columns = ("token_ids", "loss_mask", "logprobs", "versions", "turn_ids")
    return replace(
        whole,
        end_reason=EndReason.UNFINISHED,
        num_turns=num_turns,
        invalid_turns=whole.invalid_turns[:num_turns],
        turn_scores=whole.turn_scores[:num_turns],
        **{column: getattr(whole, column)[:num] for column in columns},
    )


def run_config_with_policy(folder: Path, **learner: Any) -> RunConfig:
    """Save a policy and return the configuration of a learner that trains it in fp32."""
    make_model().save_pretrained(folder / "policy")
    section = LearnerSection(device="cpu", precision=Precision.FP32, warmup_steps=0, **learner)
    model = ModelSection(path=str(folder / "policy"), dtype="float32")
    return RunConfig(model=model, learner=section)


def held_by(groups: GroupAssembly) -> list[Trajectory]:
    """Every trajectory that is in no batch yet."""
    ready = [t for group in groups._ready for t in group.members]
    return ready + [t for entry in groups._open.values() for t in entry.arrived.values()]


def make_samples(*, num_groups: int = 3, size: int = 2, seed: int = 0) -> list[Sample]:
    """Build random samples of 6 to 12 tokens, alternating advantages +1 and -1."""
    rng = np.random.default_rng(seed)
    samples = []
    for group in range(num_groups):
        for member in range(size):
            length = int(rng.integers(6, 13))
            mask = [0, 0, *rng.integers(0, 2, size=length - 3), 1]
            trajectory = make_trajectory(
                rng.integers(0, VOCAB, size=length).tolist(),
                mask,
                logprobs=(-3.9 + 0.2 * rng.standard_normal(sum(mask))).tolist(),
                group_id=f"g{group}",
                member=member,
            )
            samples.append(Sample(trajectory=trajectory, advantage=1.0 - 2.0 * (member % 2)))
    return samples


def with_prompts(samples: list[Sample]) -> list[Sample]:
    """Let the members of each group begin with the same 20 tokens."""
    longer = []
    for sample in samples:
        t = sample.trajectory
        prompt = np.random.default_rng(ord(t.group_id[-1])).integers(0, VOCAB, 20)
        nothing = {"loss_mask": False, "logprobs": 0.0, "versions": -1, "turn_ids": 0}
        arrays = {n: np.concatenate([np.full(20, v), getattr(t, n)]) for n, v in nothing.items()}
        arrays["token_ids"] = np.concatenate([prompt, t.token_ids])
        typed = {n: a.astype(getattr(t, n).dtype) for n, a in arrays.items()}
        longer.append(replace(sample, trajectory=replace(t, **typed)))
    return longer


def make_model(*, seed: int = 0, is_tied: bool = False, num_layers: int = 2) -> Qwen3ForCausalLM:
    """Build a Qwen3 of random weights: layers of width 32, fp32."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=64,
        max_position_embeddings=64,
        tie_word_embeddings=is_tied,
        initializer_range=0.2,  # larger than usual, so that mistakes are larger than tolerances
    )
    config._attn_implementation = "eager"
    return Qwen3ForCausalLM(config).train()


class MixingEmbedding(nn.Embedding):
    """Adds half of the embedding of the token before: no layer that packing could separate."""

    def forward(self, input: Tensor) -> Tensor:
        embedded = super().forward(input)
        return embedded + 0.5 * F.pad(embedded, (0, 0, 1, 0))[..., :-1, :]


def make_mixing_model() -> Qwen3ForCausalLM:
    """Build a model whose packed sequences see each other in any attention."""
    model = make_model()
    num_tokens, width = model.model.embed_tokens.weight.shape
    embedding = MixingEmbedding(num_tokens, width)
    embedding.weight = model.model.embed_tokens.weight
    model.model.embed_tokens = embedding
    return model


def recompute(network: torch.nn.Module) -> None:
    """Let all layers of a network compute their activations again, as `activations=recompute`."""
    use_activations(network, Activations.RECOMPUTE, StoredLayers(0, False), 0)


def make_model_with_adapters(*, seed: int = 0, rank: int = 4) -> Qwen3ForCausalLM:
    """Build the same model with adapters that have been trained a little: they change much."""
    model = make_model(seed=seed)
    add_adapters(model, LoraSection(rank=rank, alpha=2.0 * rank), base_path="base")
    torch.manual_seed(seed + 1)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def tensors_of(source: WeightSource) -> dict[str, Tensor]:
    """Return a source's tensors, copied, by name."""
    copy = copied(source)
    return dict(views(copy.buffer, copy.specs))


def trainer_of(
    model: Any,
    precision: Precision,
    *,
    dtype: str = "float32",
    lr: float = 1e-5,
    rounding: Rounding = Rounding.NEAREST,
) -> Trainer:
    """Return a trainer for engines in `dtype`, which accepts samples of other policies."""
    learner = LearnerSection(
        device="cpu",
        precision=precision,
        rounding=rounding,
        lr=lr,
        warmup_steps=0,
        controller=ControllerSection(skip_step=False),
    )
    settings = TrainerSettings(
        learner=learner, algorithm=AlgorithmSection(), num_steps=100, engine_dtype=dtype
    )
    return Trainer(settings, Networks(policy=model))


def make_microbatches(
    samples: Sequence[Sample],
    indices: Sequence[int],
    *,
    max_tokens: int,
    device: torch.device | str,
    is_packed: bool = False,
    shares_prefix: bool = False,
) -> list[MicroBatch]:
    """Return all blocks of `each_microbatch`."""
    return list(
        each_microbatch(
            samples,
            indices,
            max_tokens=max_tokens,
            device=device,
            is_packed=is_packed,
            shares_prefix=shares_prefix,
        )
    )


def snapshot(
    version: int,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    canary_token_ids: list[list[int]],
    canary_logprobs: list[list[float]],
) -> PublishedWeights:
    """Return a version that is a copy of named tensors, in their own dtypes."""
    return PublishedWeights(
        version=version,
        source=copied(LiveWeights(tensors, None)),
        canary_token_ids=canary_token_ids,
        canary_logprobs=canary_logprobs,
    )
