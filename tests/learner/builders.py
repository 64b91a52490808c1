"""Small trajectories and models for the learner's tests."""

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from common.wire.messages import EndReason, EpisodeKind, PolicyKind, Trajectory
from learner.batch.batching import Sample

VOCAB = 50


def make_trajectory(
    token_ids: list[int],
    loss_mask: list[int],
    *,
    logprobs: list[float] | None = None,
    version: int = 0,
    group_id: str = "g0",
    member: int = 0,
) -> Trajectory:
    """Build a trajectory; `logprobs` has one entry per sampled token, -1.0 by default."""
    mask = np.array(loss_mask, dtype=bool)
    full = np.zeros(len(token_ids), dtype=np.float32)
    full[mask] = -1.0 if logprobs is None else logprobs
    return Trajectory(
        episode_id=f"{group_id}/{member}",
        group_id=group_id,
        member=member,
        attempt=0,
        kind=EpisodeKind.TRAIN,
        policy=PolicyKind.MODEL,
        env="toy",
        item_id="toy-train-0",
        seed=0,
        horizon=4,
        horizon_stage=0,
        opened_at_version=version,
        actor="actor-0",
        end_reason=EndReason.DONE,
        error="",
        reward=1.0,
        is_success=True,
        num_turns=1,
        num_invalid_actions=0,
        generate_s=0.0,
        env_s=0.0,
        wall_s=0.0,
        token_ids=np.array(token_ids, dtype=np.int32),
        loss_mask=mask,
        logprobs=full,
        versions=np.where(mask, version, -1).astype(np.int32),
        turn_ids=np.zeros(len(token_ids), dtype=np.int32),
        invalid_turns=np.zeros(1, dtype=bool),
        turn_scores=np.ones(1, dtype=np.float32),
    )


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


def make_model(*, seed: int = 0, is_tied: bool = False) -> Qwen3ForCausalLM:
    """Build a Qwen3 of random weights: 2 layers of width 32, fp32."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
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
