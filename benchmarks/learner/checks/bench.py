"""The sizes of the checks of one device, and the models, batches and trainers of these sizes."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from benchmarks.learner.batch import BatchShape, ModelShape, make_batch, make_random_model
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
    num_prompts: int  # Turns that an engine samples at once.
    turn_tokens: int  # Sampled tokens of a turn.
    engine_lora_rank: int


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

    def trainer(self, model: PreTrainedModel, cfg: LearnerSection | None = None) -> Trainer:
        """Return a trainer of a model, by default with the usual settings."""
        learner = cfg or self.sizes.learner
        return make_trainer(learner, AlgorithmSection(), model, engine_dtype="bfloat16")

    def canaries(self, model: PreTrainedModel) -> list[list[int]]:
        """Return random token ids [canary, seq]."""
        size = (self.sizes.num_canaries, self.sizes.canary_tokens)
        return np.random.default_rng(0).integers(0, vocabulary_size(model), size=size).tolist()
