"""Memory use of each role, part by part, with the calculation."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from common.config.algorithm import Advantage
from common.config.learner import (
    EXPERTS,
    CriticKind,
    LearnerSection,
    LoraSection,
    Moments,
    Offload,
    OptimizerKind,
    Precision,
    WeightsTransport,
)
from common.config.run_config import RunConfig
from common.host.machine import GIB, has_bf16_units
from common.text import counted
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


PUBLISH_BUCKETS = 2  # The bucket that is sent and the next one.
LEARNER_WORK_BYTES = 2 * GIB  # CUDA's context, NCCL's buffers, fragmentation.
NAME_OF = {2: "bf16", 4: "fp32"}
SAMPLING = "sampling"  # Phases of a GPU whose engine sleeps during the learner's step.
TRAINING = "training"
ASLEEP_BYTES = 3 * GIB // 2  # CUDA's context and graphs, which a sleeping engine keeps.
ENGINE_WORK_BYTES = 3 * GIB // 2  # Use of a GPU engine besides weights and cache.


# Parts of a learner that exist between steps, too.
KEPT_LABELS = (
    "learner w",
    "frozen weights",
    "adapters",
    "optimizer",
    "reference",
    "critic",
    "publish buckets",
)


@dataclass(frozen=True, slots=True)
class Part:
    """One line of the plan."""

    label: str
    num_bytes: int
    how: str  # The calculation.
    is_peak: bool = False  # The part exists only during the longest episodes; the check ignores it.
    times: int = 1  # Number of equal parts that this one stands for.
    phase: str = ""  # SAMPLING or TRAINING: the part exists only then; "" for both.


def _weights(label: str, num: int, width: int, note: str = "") -> Part:
    """Return the memory of weights with `width` bytes each."""
    return Part(label, num * width, f"{num / 1e6:,.1f}M x {width} B{note}")


def learner_parts(cfg: RunConfig, shape: ModelShape, *, is_cuda: bool, rank: int) -> list[Part]:
    """Return the parts of one rank on its device; the first rank also publishes.

    They include the rank's share of the sharded tensors, unless those are offloaded.
    """
    learner = cfg.learner
    kept = [] if is_offloaded(cfg, is_cuda) else _sharded_parts(cfg, shape, is_cuda=is_cuda)
    parts = [*kept, *_activation_parts(cfg, shape, is_cuda=is_cuda)]
    parts += [Part("learner work space", LEARNER_WORK_BYTES, "about")] if is_cuda else []
    if rank > 0:
        return parts
    version_bytes = shape.num_params * BYTES_OF[cfg.model.dtype]
    bucket_bytes = min(learner.publish_bucket_mb << 20, version_bytes)
    how = f"at most {PUBLISH_BUCKETS} x learner.publish_bucket_mb={learner.publish_bucket_mb}"
    parts.append(Part("publish buckets", PUBLISH_BUCKETS * bucket_bytes, how))
    return parts


def is_offloaded(cfg: RunConfig, is_cuda: bool) -> bool:
    """Return whether the ranks keep their shares of the weights in host memory."""
    return is_cuda and cfg.learner.offload is Offload.OPTIMIZER


def learner_host_parts(cfg: RunConfig, shape: ModelShape, *, is_cuda: bool) -> list[Part]:
    """Return the parts of all ranks together in host memory, for any device."""
    learner = cfg.learner
    parts: list[Part] = []
    if is_offloaded(cfg, is_cuda):
        own = _sharded_parts(cfg, shape, is_cuda=is_cuda)
        parts = times(own, learner.local_ranks, "ranks")
    trained = [lora_params(learner.lora, shape) if learner.lora.rank else shape.num_params]
    trained += [shape.num_params] if _has_own_critic(cfg) else []
    each = 4 + adamw_part(learner.moments, 64).num_bytes / 64
    how = f"{sum(trained) / 1e6:,.1f}M x {each:.4g} B (weights and moments, while they are written)"
    num_nodes = learner.shard_ranks // learner.local_ranks
    how += f" / {num_nodes} nodes" * (num_nodes > 1)
    parts.append(Part("checkpoint copies", int(each * sum(trained) / num_nodes), how))
    return [*parts, *_publish_copies(cfg, shape)]


def _publish_copies(cfg: RunConfig, shape: ModelShape) -> list[Part]:
    """Return the weight versions that the first rank keeps in host memory for publishing."""
    learner = cfg.learner
    versions = 2 * _keeps_versions(cfg)  # The newest one, and as much for its changes at most.
    if learner.hold_back_steps:
        versions += 2 + learner.hold_back_steps  # The engines' one, the next, the held-back.
    if versions == 0:
        return []
    copy = _weights("publish copies", shape.num_params, BYTES_OF[cfg.model.dtype])
    return [
        Part(
            copy.label,
            versions * copy.num_bytes,
            f"{counted(versions, 'copy', 'copies')} x {copy.how}",
        )
    ]


def _keeps_versions(cfg: RunConfig) -> bool:
    """Return whether the publisher keeps copies of versions."""
    return cfg.learner.publish.keeps_versions(
        cfg.model.dtype, has_adapters=cfg.learner.lora.rank > 0, is_sleeping=cfg.actor.sleep > 0
    )


def _sharded_parts(cfg: RunConfig, shape: ModelShape, *, is_cuda: bool) -> list[Part]:
    """Return a rank's share of weights, gradients, moments, reference and critic."""
    learner = cfg.learner
    num = shape.num_params
    frozen = frozen_bytes(learner, is_cuda)
    if learner.lora.rank:
        trained = lora_params(learner.lora, shape)
        parts = [
            _weights("frozen weights", num, frozen, f" ({NAME_OF[frozen]})"),
            _weights("adapters", trained, 4, f" (rank {learner.lora.rank}, fp32)"),
            _weights("gradients", trained, 4),
            adamw_part(learner.moments, trained),
        ]
    else:
        parts = [
            _weights("learner weights", num, 4, " (fp32 master)"),
            _weights("gradients", num, 4),
            _optimizer_part(learner, shape),
        ]
    path = cfg.algorithm.reference_path
    is_base = learner.lora.rank > 0 and path in ("", cfg.model.path)
    if cfg.algorithm.kl_coef > 0 and not is_base:
        why = f" ({NAME_OF[frozen]}; algorithm.kl_coef > 0)"
        parts.append(_weights("reference", num, frozen, why))
    if _has_own_critic(cfg):
        rest = _weights("critic", num, 8, " (weights, gradients)")
        kept = adamw_part(learner.moments, num)
        parts.append(Part("critic", rest.num_bytes + kept.num_bytes, f"{rest.how} + {kept.how}"))
    return [_share(part, learner.shard_ranks) for part in parts]


def frozen_bytes(learner: LearnerSection, is_cuda: bool) -> int:
    """Return the bytes of one frozen weight."""
    return 2 if is_cuda and learner.precision is not Precision.FP32 else 4


def _has_own_critic(cfg: RunConfig) -> bool:
    """Return whether the critic is a network of its own."""
    is_critic = cfg.algorithm.advantage is Advantage.PPO
    return is_critic and cfg.learner.critic.kind is CriticKind.MODEL


def lora_params(lora: LoraSection, shape: ModelShape) -> int:
    """Return the number of adapter weights: rank x (inputs + outputs) of every adapted layer."""
    queries = shape.heads * shape.head_dim
    keys = shape.kv_heads * shape.head_dim
    hidden = shape.hidden
    units = shape.intermediate
    sizes = {
        "q_proj": hidden + queries,
        "k_proj": hidden + keys,
        "v_proj": hidden + keys,
        "o_proj": queries + hidden,
        "gate_proj": hidden + units,
        "up_proj": hidden + units,
        "down_proj": units + hidden,
        EXPERTS: shape.experts * (2 * hidden + 3 * shape.expert_units),
    }
    chosen = [size for name, size in sizes.items() if not lora.targets or name in lora.targets]
    return shape.layers * lora.rank * sum(chosen)


def _share(part: Part, num_ranks: int) -> Part:
    """Return the part of one rank if the ranks share it equally."""
    if num_ranks == 1:
        return part
    return Part(part.label, -(-part.num_bytes // num_ranks), f"({part.how}) / {num_ranks} ranks")


def adamw_part(moments: Moments, num: int) -> Part:
    """Return AdamW's two moments: fp32, or 1 byte each and a 4-byte scale per 256 values."""
    if moments is Moments.FP32:
        return _weights("optimizer", num, 8, " (AdamW)")
    return Part("optimizer", num * 65 // 32, f"{num / 1e6:,.1f}M x 2.03 B (AdamW, 8 bits)")


def _optimizer_part(learner: LearnerSection, shape: ModelShape) -> Part:
    """Return the memory of the optimizer's state."""
    num = shape.num_params
    if learner.optimizer is OptimizerKind.ADAMW:
        return adamw_part(learner.moments, num)
    tables = _weights("", min(num, 2 * shape.vocab * shape.hidden), 8, " (AdamW, tables)")
    rest = _weights("", num - tables.num_bytes // 8, 4, " (Muon)")
    return Part("optimizer", tables.num_bytes + rest.num_bytes, f"{tables.how} + {rest.how}")


def _activation_parts(cfg: RunConfig, shape: ModelShape, *, is_cuda: bool) -> list[Part]:
    """Return estimates. Exact numbers depend on the kernels that torch selects.

    On a CPU, attention is computed with plain products that store the scores of all token pairs. So
    is that of a few families on a GPU.
    """
    learner = cfg.learner
    longest = -(-cfg.actor.max_model_len // learner.sequence_ranks)
    tokens = max(learner.max_tokens_per_microbatch, longest)
    is_bf16 = learner.precision is Precision.BF16
    if learner.precision is Precision.AUTO:
        is_bf16 = is_cuda or has_bf16_units()
    width = 2 if is_bf16 else 4
    attention = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    layer = 6 * shape.hidden + attention + 3 * shape.intermediate  # Numbers stored per token.
    per_token = shape.layers * layer
    depth = counted(shape.layers, "layer")
    how = f"{tokens:,} tokens x {depth} x {layer:,}"
    if learner.gradient_checkpointing:
        per_token = shape.layers * shape.hidden + layer
        how = f"{tokens:,} tokens x ({depth} x {shape.hidden} + one layer {layer:,})"
    rows = min(tokens, learner.logprob_chunk_tokens)
    logits = f"{rows:,} tokens x {shape.vocab:,} words x 4 B x 3"
    parts = [
        Part("activations", tokens * per_token * width, f"{how} x {width} B"),
        Part("logits", 3 * 4 * rows * shape.vocab, logits),
    ]
    if not is_cuda or shape.stores_scores:
        layers = 1 if learner.gradient_checkpointing else shape.layers
        pairs = 3 * shape.heads * cfg.actor.max_model_len  # Scores, softmax, and its cast.
        depth = counted(layers, "layer")
        how = f"{tokens:,} tokens x {depth} x {pairs:,} x {width} B, for longest episodes"
        size = tokens * layers * pairs * width
        parts.append(Part("attention scores, at most", size, how, is_peak=True))
    moves = is_offloaded(cfg, is_cuda)
    if learner.num_ranks > 1 or moves:
        tables = min(shape.num_params, 2 * shape.vocab * shape.hidden)
        block = (shape.num_params - tables) // shape.layers
        what = f" (tables {tables / 1e6:,.1f}M, two blocks {2 * block / 1e6:,.1f}M)"
        parts.append(_weights("gathered weights", tables + 2 * block, width, what))
        if moves:  # fp32; a gradient also in compute precision, and its fp32 sum.
            each = frozen_bytes(learner, is_cuda) if learner.lora.rank else 8 + width
            what = " (largest tensor to the GPU, or its gradient to the host)"
            parts.append(_weights("weights in transfer", max(tables, block), each, what))
    elif is_bf16 and not (learner.lora.rank and is_cuda):
        parts.append(_weights("bf16 copies of the weights", shape.num_params, 2))
    return parts


def in_phases(parts: Sequence[Part], *, num_engines: int) -> list[Part]:
    """Return the parts of a GPU whose engines sleep during the learner's step.

    Gradients, activations and gathered weights exist during the step. The parts of the engines
    exist while they sample. Weights and moments of the learner exist in both phases.
    """
    marked = [replace(part, phase=_phase_of(part.label)) for part in parts]
    how = f"about {shown(ASLEEP_BYTES)} for each sleeping engine"
    return [*marked, Part("asleep engines", num_engines * ASLEEP_BYTES, how, phase=TRAINING)]


def engine_host_parts(cfg: RunConfig, shape: ModelShape) -> list[Part]:
    """Return the host memory of one engine on GPUs: its sleeping weights, and offloaded parts."""
    parts: list[Part] = []
    if cfg.actor.sleep == 1:
        num_bytes, how = engine_weights(cfg, shape)
        parts.append(Part("engine weights", num_bytes, f"{how}, while it sleeps"))
    if weights := offloaded_weights(cfg) * cfg.actor.tensor_parallel_size:
        parts.append(Part("offloaded weights", weights, "cpu_offload_gb for each worker"))
    if cache := offloaded_cache(cfg):
        parts.append(Part("offloaded KV cache", cache, "kv_offloading_size"))
    return parts


def _phase_of(label: str) -> str:
    """Return the phase in which a part is needed; "" for both."""
    if label.startswith(("engine ", "KV cache", "incoming weights")):
        return SAMPLING
    return "" if label.startswith(KEPT_LABELS) else TRAINING


def cpu_engines_parts(cfg: RunConfig, shape: ModelShape) -> list[Part]:
    """Return the parts of all engines of a host without a GPU. Their workers share one version.

    The version is the learner's if its transport is memory.
    """
    width = BYTES_OF[cfg.model.dtype]
    num_workers = cfg.actor.tensor_parallel_size
    cache = _cache_part(cfg, shape, cfg.actor.kv_cache_gib * GIB, "actor.kv_cache_gib")
    of_engine = [
        _weights("engine weights", shape.num_params, width),
        _weights("incoming weights", shape.num_params, width, ", while they load"),
        *times([cache], num_workers, "workers"),
    ]
    parts = times(of_engine, cfg.actor.num_engines, "engines")
    transport = cfg.learner.weights_transport
    is_mapped = transport in (WeightsTransport.AUTO, WeightsTransport.MEMORY)
    if parts and (is_mapped or cfg.actor.num_engines * num_workers > 1):
        parts.append(_weights("shared version", shape.num_params, width, " for all workers"))
    elif parts and _keeps_versions(cfg):
        what = f" (learner.publish={cfg.learner.publish.value})"
        parts.append(_weights("kept version", shape.num_params, width, what))
    return parts


def gpu_engine_parts(
    cfg: RunConfig, shape: ModelShape, capacity_bytes: int, *, num_engines: int
) -> list[Part]:
    """Return the parts of engine workers on a GPU. vLLM reserves its share at the start."""
    actor = cfg.actor
    whole, how = engine_weights(cfg, shape)
    weights = whole // actor.tensor_parallel_size
    if actor.tensor_parallel_size > 1:
        how = f"({how}) / {actor.tensor_parallel_size}"
    parts = [Part("engine weights", weights, how)]
    fixed = fixed_cache(cfg)
    if capacity_bytes or fixed:
        share = int(actor.gpu_memory_frac * capacity_bytes)
        cache = fixed or max(0, share - weights - ENGINE_WORK_BYTES)
        key = f"the rest of actor.gpu_memory_frac={actor.gpu_memory_frac:g}"
        key = "actor.engine_args.kv_cache_memory_bytes" if fixed else key
        parts.append(Part("engine work space", ENGINE_WORK_BYTES, "about"))
        parts.append(_cache_part(cfg, shape, cache, key))
    what = " (in pinned host memory if the GPU has no room)"
    incoming = _weights("incoming weights", shape.num_params, BYTES_OF[cfg.model.dtype], what)
    return [*times(parts, num_engines, "engines"), replace(incoming, is_peak=True)]


def _cache_part(cfg: RunConfig, shape: ModelShape, num_bytes: int, key: str) -> Part:
    """Return an engine's KV cache, with the number of episodes that it holds."""
    actor = cfg.actor
    each = max(1, kv_bytes_per_token(cfg, shape) // actor.tensor_parallel_size)
    tokens = num_bytes // each
    how = (
        f"{key}: {tokens:,} tokens of {each:,} B,"
        f" {tokens / actor.max_model_len:,.1f} concurrent episodes of {actor.max_model_len:,}"
    )
    return Part("KV cache", num_bytes, how)


def times(parts: Sequence[Part], number: int, of: str) -> list[Part]:
    """Return the parts of `number` equal owners together; an empty list for 0."""
    if number == 1:
        return list(parts)
    several = [
        replace(
            p,
            num_bytes=number * p.num_bytes,
            how=f"{number} {of} x ({p.how})",
            times=number * p.times,
        )
        for p in parts
    ]
    return several if number else []


def shown(num_bytes: float) -> str:
    """Return a size as text."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"
