"""Settings that fit the sizes of a model, and each other."""

import math
from collections.abc import Sequence

from common.host.machine import GIB
from learner.policy.model_shape import BYTES_OF, ModelShape

MAX_MODEL_LEN = 16_384  # Tokens. A longer context needs more cache than most machines have.
MAX_TURN_TOKENS = 512  # Room for a thought and an action.


def merged_overrides(overrides: Sequence[str]) -> list[str]:
    """Return the overrides with each key once; later values replace earlier ones.

    Example: a=1, b=2, a=3 give a=3, b=2. A command line refuses a key that it has twice.
    """
    return list({each.partition("=")[0]: each for each in overrides}.values())


def fitting_overrides(shape: ModelShape) -> list[str]:
    """Return the settings of the engine and of a turn that suit a model.

    Example: 40,960 positions and 28 KiB of cache a token give max_model_len=16384,
    max_turn_tokens=512, and kv_cache_gib=1 for two such episodes at once.
    """
    context = min(shape.context_tokens or MAX_MODEL_LEN, MAX_MODEL_LEN)
    dtype = shape.dtype if shape.dtype in BYTES_OF else "bfloat16"
    cache_gib = max(1, math.ceil(2 * context * shape.kv_bytes_per_token(dtype) / GIB))
    return [
        f"actor.max_model_len={context}",
        f"actor.max_turn_tokens={min(MAX_TURN_TOKENS, context // 4)}",
        f"actor.kv_cache_gib={cache_gib}",
        f"model.dtype={dtype}",
    ]
