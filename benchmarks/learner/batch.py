"""Random batches and models of realistic shapes, for measurements without an environment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import yaml
from torch import nn
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from common.wire.messages import Trajectory
from learner.batch.batching import Sample
from learner.training.trainer import Trainer
from tools.simulator.workload import synthetic_trajectory

# Noise of the sampler's logprobs in nats: ratios are close to one, and none equals it.
SAMPLER_NOISE = 0.05
MAX_SEQ_TOKENS = 16_384
MAX_LAG = 3  # Maximum number of versions in a trajectory.


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """Number and length of the episodes of a step."""

    num_groups: int
    group_size: int
    max_turns: int  # Turns are uniform in [1, max_turns].
    observation_tokens: int  # Before every turn.
    action_tokens: int  # Sampled tokens per turn.


ModelShape = Mapping[str, int]  # Sizes of a Qwen3, with the names of transformers.
_MODELS = Path(__file__).with_name("models.yaml")
MODELS: dict[str, ModelShape] = yaml.safe_load(_MODELS.read_text(encoding="utf-8"))

# Like quickstart at step 100: 64 episodes of about 200 tokens, about 30 of them sampled.
QUICKSTART = BatchShape(
    num_groups=8, group_size=8, max_turns=9, observation_tokens=35, action_tokens=6
)
# Fewer and longer episodes, for a model that needs more time for each token.
LARGER = BatchShape(
    num_groups=2, group_size=4, max_turns=12, observation_tokens=30, action_tokens=20
)
# TextCraft with a language model: longer reasoning, every other token sampled.
LANGUAGE_MODEL = BatchShape(
    num_groups=4, group_size=4, max_turns=15, observation_tokens=100, action_tokens=100
)

# A total of 16k tokens in one row: eight episodes of 128 to 4,096 tokens, every other token
# sampled.
PACKED = BatchShape(
    num_groups=1, group_size=8, max_turns=32, observation_tokens=64, action_tokens=64
)


def make_batch(shape: BatchShape, *, vocab_size: int, seed: int) -> list[Sample]:
    """Return episodes of random tokens with rewards 0 and 1; advantages sum to zero."""
    rng = np.random.default_rng(seed)
    samples: list[Sample] = []
    for group in range(shape.num_groups):
        for member in range(shape.group_size):
            trajectory = _episode(shape, rng, vocab_size, group_id=f"g{group}", member=member)
            samples.append(Sample(trajectory=trajectory, advantage=1.0 - 2.0 * (member % 2)))
    return samples


def _episode(
    shape: BatchShape, rng: np.random.Generator, vocab_size: int, *, group_id: str, member: int
) -> Trajectory:
    """Return a random episode of this shape."""
    num_turns = int(rng.integers(1, shape.max_turns + 1))
    turn_tokens = shape.observation_tokens + shape.action_tokens
    mask = np.tile(np.arange(turn_tokens) >= shape.observation_tokens, num_turns)
    turn_ids = np.repeat(np.arange(num_turns), turn_tokens).astype(np.int32)
    is_success = member % 2 == 0
    return synthetic_trajectory(
        rng.integers(0, vocab_size, size=len(mask)),
        mask,
        group_id=group_id,
        member=member,
        horizon=shape.max_turns,
        reward=float(is_success),
        is_success=is_success,
        num_turns=num_turns,
        versions=np.where(mask, np.minimum(turn_ids, MAX_LAG), -1).astype(np.int32),
        turn_ids=turn_ids,
        invalid_turns=np.zeros(num_turns, dtype=bool),
        turn_scores=np.linspace(0.0, float(is_success), num_turns, dtype=np.float32),
    )


def with_sampler_logprobs(
    samples: Sequence[Sample], trainer: Trainer, *, seed: int
) -> list[Sample]:
    """Return the samples with the trainer policy's logprobs and a little noise."""
    rng = np.random.default_rng(seed)
    scores = trainer.score([sample.trajectory.token_ids.tolist() for sample in samples])
    result: list[Sample] = []
    for sample, score in zip(samples, scores, strict=True):
        trajectory = sample.trajectory
        noisy = np.array([0.0, *score]) + SAMPLER_NOISE * rng.standard_normal(len(score) + 1)
        logprobs = np.where(trajectory.loss_mask, np.minimum(noisy, -1e-6), 0.0)
        changed = replace(trajectory, logprobs=logprobs.astype(np.float32))
        result.append(replace(sample, trajectory=changed))
    return result


def make_random_model(
    shape: ModelShape,
    *,
    device: torch.device,
    is_tied: bool = False,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """Return a Qwen3 of random weights on `device`, in training mode."""
    torch.manual_seed(0)
    config = Qwen3Config(
        **shape,  # pyright: ignore[reportArgumentType]
        max_position_embeddings=MAX_SEQ_TOKENS,
        tie_word_embeddings=is_tied,
        use_cache=False,
    )
    # Loading a policy makes the same choice.
    config._attn_implementation = "sdpa" if device.type == "cuda" else "eager"
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # A large model must not exist in two types at once.
    try:
        with device:
            model = Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    nn.Module.to(model, device, dtype=dtype)
    return model.train()


def num_weights(shape: ModelShape) -> int:
    """Return the approximate number of weights of a model, with its tables counted once."""
    attention = 2 * (shape["num_attention_heads"] + shape["num_key_value_heads"])
    layer = shape["hidden_size"] * (attention * shape["head_dim"] + 3 * shape["intermediate_size"])
    return shape["num_hidden_layers"] * layer + shape["vocab_size"] * shape["hidden_size"]
