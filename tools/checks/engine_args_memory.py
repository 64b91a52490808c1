"""The arguments of `actor.engine_args` that change the memory of an engine."""

from typing import Any

from common.config.run_config import RunConfig
from common.host.machine import GIB
from learner.policy.model_shape import BYTES_OF, ModelShape

# Bytes of one number in the KV cache, by vLLM's `kv_cache_dtype`.
KV_BYTES = {"float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
# Bytes of one weight of a layer, by vLLM's `quantization`. Tables keep the model's dtype.
WEIGHT_BYTES = {"fp8": 1}
COUNTED = ("kv_cache_memory_bytes", "cpu_offload_gb", "kv_offloading_size")
# Arguments that change no large memory.
NEUTRAL = (
    "async_scheduling",
    "attention_backend",
    "block_size",
    "enable_chunked_prefill",
    "enable_expert_parallel",
    "scheduling_policy",
)


def kv_bytes_per_token(cfg: RunConfig, shape: ModelShape) -> int:
    """Return the bytes of one token in the KV cache of all workers of an engine."""
    width = KV_BYTES.get(_text(cfg, "kv_cache_dtype"))
    whole = shape.kv_bytes_per_token(cfg.model.dtype)
    return whole if width is None else whole // BYTES_OF[cfg.model.dtype] * width


def engine_weights(cfg: RunConfig, shape: ModelShape) -> tuple[int, str]:
    """Return the bytes of an engine's weights on all its workers, and the calculation."""
    width = BYTES_OF[cfg.model.dtype]
    packed = WEIGHT_BYTES.get(_text(cfg, "quantization"))
    if packed is None:
        num_bytes = shape.num_params * width
        how = f"{shape.num_params / 1e6:,.1f}M x {width} B"
    else:
        tables = min(shape.num_params, 2 * shape.vocab * shape.hidden)
        rest = shape.num_params - tables
        num_bytes = tables * width + rest * packed
        how = f"{rest / 1e6:,.1f}M x {packed} B + tables {tables / 1e6:,.1f}M x {width} B"
    away = min(num_bytes, offloaded_weights(cfg) * cfg.actor.tensor_parallel_size)
    if away:
        how = f"{how} - {away / GIB:.1f} GiB in host memory"
    return num_bytes - away, how


def offloaded_weights(cfg: RunConfig) -> int:
    """Return the bytes of weights that each worker keeps in host memory (`cpu_offload_gb`)."""
    return int(_number(cfg, "cpu_offload_gb") * GIB)


def offloaded_cache(cfg: RunConfig) -> int:
    """Return the bytes of KV cache that an engine keeps in host memory (`kv_offloading_size`)."""
    return int(_number(cfg, "kv_offloading_size") * GIB)


def fixed_cache(cfg: RunConfig) -> int:
    """Return the bytes of a worker's KV cache that an argument fixes; 0: the rest of the GPU."""
    return int(_number(cfg, "kv_cache_memory_bytes"))


def uncounted(cfg: RunConfig) -> list[str]:
    """Return the given arguments whose memory the plan does not know, as key=value."""
    known = {*COUNTED, *NEUTRAL}
    known |= {"kv_cache_dtype"} if _text(cfg, "kv_cache_dtype") in {"auto", *KV_BYTES} else set()
    known |= {"quantization"} if _text(cfg, "quantization") in WEIGHT_BYTES else set()
    given = cfg.actor.engine_args
    return [f"actor.engine_args.{name}={given[name]}" for name in sorted(given.keys() - known)]


def _text(cfg: RunConfig, name: str) -> str:
    return str(cfg.actor.engine_args.get(name) or "")


def _number(cfg: RunConfig, name: str) -> float:
    value: Any = cfg.actor.engine_args.get(name)
    return float(value) if isinstance(value, int | float) else 0.0
