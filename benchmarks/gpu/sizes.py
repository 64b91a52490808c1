"""The sizes of the device checks: for a GPU, and small ones with which all checks run on a CPU."""

from dataclasses import replace

from benchmarks.learner.batch import LANGUAGE_MODEL, MODELS, PACKED, BatchShape
from benchmarks.learner.checks.bench import PackedCase, Sizes
from common.config.learner import LearnerSection

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
    num_prompts=64,
    turn_tokens=256,
    engine_lora_rank=64,
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
    num_prompts=32,
    turn_tokens=64,
    engine_lora_rank=8,
)
SIZES = {"gpu": ON_GPU, "small": SMALL}
