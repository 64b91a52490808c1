"""The sizes of the checks of one device, and the models, batches and trainers of these sizes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks.learner.batch import (
    LANGUAGE_MODEL,
    MODELS,
    PACKED,
    BatchShape,
    ModelShape,
    make_batch,
    make_random_model,
)
from benchmarks.learner.step import make_trainer
from benchmarks.suite import Suite
from common.config.algorithm import AlgorithmSection
from common.config.learner import LearnerSection, LoraSection
from learner.batch.batching import Sample
from learner.policy.lora import add_adapters
from learner.policy.model import vocabulary_size
from learner.training.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedCase:
    """A training step of packed sequences in one microbatch."""

    name: str
    model: ModelShape
    shape: BatchShape
    lora_rank: int = 0
    min_rate_frac: float  # Least share of the rate of a matrix product, on a GPU.


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of all checks on one device."""

    model: ModelShape
    full: ModelShape  # Model size for the bounds of an update.
    shape: BatchShape
    step_shape: BatchShape  # Large enough that a step's fixed work is a small share.
    learner: LearnerSection
    num_rounds: int
    memory_sequences: int
    memory_seq_tokens: int
    chunk_sizes: tuple[int, ...]
    num_canaries: int
    canary_tokens: int
    packed: tuple[PackedCase, ...]
    matrix_size: int
    growth_steps: int  # Training steps between which the process must not grow.
    tree_scale: int  # Factor of the lengths of branching rows.
    num_prompts: int  # Turns that an engine samples at once.
    turn_tokens: int  # Sampled tokens of a turn.
    engine_lora_rank: int
    long_row_tokens: int  # Tokens of a row whose memory is compared with the plan.


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBench:
    """The device that is checked, and the table for the results."""

    suite: Suite
    sizes: Sizes
    device: torch.device
    peer_device: str  # Another GPU, or "cpu" if there is only one.

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def pass_dtype(self) -> torch.dtype:
        """The usual dtype of passes on the device."""
        return torch.bfloat16 if self.is_cuda else torch.float32

    def model(self, **changes: int) -> PreTrainedModel:
        """Return a random model of the usual size."""
        return make_random_model({**self.sizes.model, **changes}, device=self.device, is_tied=True)

    def shaped(
        self, shape: ModelShape, *, lora_rank: int = 0, dtype: torch.dtype = torch.float32
    ) -> PreTrainedModel:
        """Return a random model; with adapters the base is frozen in bf16 on CUDA."""
        dtype = torch.bfloat16 if lora_rank and self.is_cuda else dtype
        model = make_random_model(shape, device=self.device, is_tied=lora_rank == 0, dtype=dtype)
        if lora_rank:
            add_adapters(model, LoraSection(rank=lora_rank), base_path="")
            nn.Module.to(model, self.device)
        return model

    def samples(self, model: PreTrainedModel) -> list[Sample]:
        """Return the samples of a step."""
        return make_batch(self.sizes.shape, vocab_size=vocabulary_size(model), seed=0)

    def trainer(
        self,
        model: PreTrainedModel,
        cfg: LearnerSection | None = None,
        *,
        engine_dtype: str = "bfloat16",
    ) -> Trainer:
        """Return a trainer of a model, by default with the usual settings."""
        learner = cfg or self.sizes.learner
        return make_trainer(learner, AlgorithmSection(), model, engine_dtype=engine_dtype)

    def canaries(self, model: PreTrainedModel) -> list[list[int]]:
        """Return random token ids [canary, seq]."""
        size = (self.sizes.num_canaries, self.sizes.canary_tokens)
        return np.random.default_rng(0).integers(0, vocabulary_size(model), size=size).tolist()


ON_GPU = Sizes(
    model=MODELS["half_billion"],
    full=MODELS["seven_billion"],
    shape=LANGUAGE_MODEL,
    step_shape=LANGUAGE_MODEL,
    learner=LearnerSection(device="cuda", lr=1e-5, warmup_steps=0, max_tokens_per_microbatch=4_096),
    num_rounds=5,
    memory_sequences=4,
    memory_seq_tokens=1_024,
    chunk_sizes=(256, 512, 1_024, 2_048),
    num_canaries=4,
    canary_tokens=256,
    packed=(
        PackedCase(name="Qwen3-4B", model=MODELS["qwen3_4b"], shape=PACKED, min_rate_frac=0.4),
        PackedCase(
            name="7B, LoRA",
            model=MODELS["seven_billion"],
            shape=PACKED,
            lora_rank=32,
            min_rate_frac=0.4,
        ),
        PackedCase(name="Qwen3-0.6B", model=MODELS["qwen3_0_6b"], shape=PACKED, min_rate_frac=0.25),
    ),
    matrix_size=8_192,
    growth_steps=200,
    tree_scale=4,
    num_prompts=64,
    turn_tokens=256,
    engine_lora_rank=64,
    long_row_tokens=32_768,
)

_SHAPE = BatchShape(num_groups=2, group_size=2, max_turns=3, observation_tokens=3, action_tokens=2)
_NARROW = {**MODELS["wide"], "vocab_size": 16_384, "hidden_size": 32, "head_dim": 16}
# An engine supports no smaller heads.
_ENGINE_SIZED = {**_NARROW, "hidden_size": 64, "head_dim": 32}
SMALL = Sizes(
    model=_ENGINE_SIZED,
    full=_ENGINE_SIZED,
    shape=_SHAPE,
    step_shape=replace(
        _SHAPE, num_groups=4, group_size=4, max_turns=6, observation_tokens=12, action_tokens=8
    ),
    learner=LearnerSection(device="cpu", lr=1e-4, warmup_steps=0),
    num_rounds=2,
    memory_sequences=4,
    memory_seq_tokens=64,
    chunk_sizes=(32, 64),
    num_canaries=2,
    canary_tokens=16,
    packed=(
        PackedCase(name="full", model=_NARROW, shape=_SHAPE, min_rate_frac=0.4),
        PackedCase(
            name="with adapters", model=_NARROW, shape=_SHAPE, lora_rank=4, min_rate_frac=0.4
        ),
        PackedCase(name="full, again", model=_NARROW, shape=_SHAPE, min_rate_frac=0.25),
    ),
    matrix_size=64,
    growth_steps=8,
    tree_scale=1,
    num_prompts=32,
    turn_tokens=64,
    engine_lora_rank=8,
    long_row_tokens=512,
)
SIZES = {"gpu": ON_GPU, "small": SMALL}


def canary_delta(
    known: Sequence[Sequence[float]],
    engine_model: PreTrainedModel,
    sequences: Sequence[Sequence[int]],
) -> float:
    """Return the mean |difference| in nats between scores [canary, seq-1] and a forward pass."""
    deltas: list[Tensor] = []
    for token_ids, scores in zip(sequences, known, strict=True):
        ids = torch.tensor([token_ids], device=engine_model.device)  # [1, seq]
        with torch.no_grad():
            logits = engine_model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        theirs = logits.log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)  # [seq - 1]
        deltas.append((theirs.cpu() - torch.tensor(scores)).abs())
    return torch.cat(deltas).mean().item()
