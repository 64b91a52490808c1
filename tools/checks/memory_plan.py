"""The memory that a run will use, per GPU and host, before any weights are loaded."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from common.config.algorithm import Advantage
from common.config.learner import (
    EXPERTS,
    Activations,
    Attention,
    CriticKind,
    LearnerSection,
    LoraSection,
    Moments,
    Offload,
    OptimizerKind,
    Precision,
    Rounding,
    WeightsTransport,
)
from common.config.model import BaseFormat
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.host.machine import GIB, Gpu, gpus, has_bf16_units, memory_bytes
from common.repository import ROOT
from common.text import counted
from learner.policy.activation_plan import (
    ActivationBytes,
    RowSizes,
    activation_bytes,
    choose_layers,
    logit_bytes,
    row_of,
)
from learner.policy.model_shape import BYTES_OF, ModelShape, read_shape
from learner.policy.precision_choice import choose_precision
from tools.checks.gpu_placement import GpuAssignment, assign_gpus, trains_on_gpu, used_gpus
from tools.checks.served_engines import ServedEngine, served_engines

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
PUBLISH_BUCKETS = 2  # The bucket that is sent and the next one.
LEARNER_WORK_BYTES = 2 * GIB  # CUDA's context, NCCL's buffers, fragmentation.
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
ACTIVATIONS = "activations"
# Share of a memory that `learner.activations=auto` leaves free: the plan is an estimate.
RESERVED_FRAC = 0.05
FRAC = "actor.gpu_memory_frac"
PROCESS_BYTES = 1 * GIB  # torch and vLLM themselves; measured: 0.7-1.1 GiB per process.
GPU_REMEDY = (
    "use more GPUs for the learner (learner.num_gpus), train adapters (learner.lora.rank=16, also"
    " beside model.base=nf4), set"
    " learner.activations=offload or learner.moments=8bit, lower actor.gpu_memory_frac or"
    " learner.max_tokens_per_microbatch, divide rows over several GPUs (learner.sequence_ranks),"
    " or use GPUs with more memory"
)
HOST_REMEDY = (
    "lower learner.max_tokens_per_microbatch, actor.kv_cache_gib, actor.num_actors or"
    " learner.num_ranks, or set learner.activations=recompute"
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
        formula = f"{shape.num_params / 1e6:,.1f}M x {width} B"
    else:
        tables = min(shape.num_params, 2 * shape.vocab * shape.hidden)
        rest = shape.num_params - tables
        num_bytes = tables * width + rest * packed
        formula = f"{rest / 1e6:,.1f}M x {packed} B + tables {tables / 1e6:,.1f}M x {width} B"
    away = min(num_bytes, _gib_argument(cfg, "cpu_offload_gb") * cfg.actor.tensor_parallel_size)
    if away:
        formula = f"{formula} - {away / GIB:.1f} GiB in host memory"
    return num_bytes - away, formula


def uncounted(cfg: RunConfig) -> list[str]:
    """Return the given arguments whose memory the plan does not know, as key=value."""
    understood = {*COUNTED, *NEUTRAL}
    understood |= (
        {"kv_cache_dtype"} if _text(cfg, "kv_cache_dtype") in {"auto", *KV_BYTES} else set()
    )
    understood |= {"quantization"} if _text(cfg, "quantization") in WEIGHT_BYTES else set()
    arguments = cfg.actor.engine_args
    return [
        f"actor.engine_args.{name}={arguments[name]}"
        for name in sorted(arguments.keys() - understood)
    ]


def _text(cfg: RunConfig, name: str) -> str:
    return str(cfg.actor.engine_args.get(name) or "")


def _gib_argument(cfg: RunConfig, name: str) -> int:
    """Return the bytes of an engine's argument in GiB; 0 if it is not set."""
    return int(_number(cfg, name) * GIB)


def _number(cfg: RunConfig, name: str) -> float:
    value: Any = cfg.actor.engine_args.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


@dataclass(frozen=True, slots=True)
class Part:
    """One line of the plan."""

    label: str
    num_bytes: int
    formula: str
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
    sharded = [] if is_offloaded(cfg, is_cuda) else _sharded_parts(cfg, shape, is_cuda=is_cuda)
    parts = [*sharded, *_activation_parts(cfg, shape, is_cuda=is_cuda)]
    parts += [Part("learner work space", LEARNER_WORK_BYTES, "about")] if is_cuda else []
    if rank > 0:
        return parts
    version_bytes = shape.num_params * BYTES_OF[cfg.model.dtype]
    bucket_bytes = min(learner.publish_bucket_mb << 20, version_bytes)
    formula = f"at most {PUBLISH_BUCKETS} x learner.publish_bucket_mb={learner.publish_bucket_mb}"
    parts.append(Part("publish buckets", PUBLISH_BUCKETS * bucket_bytes, formula))
    return parts


def is_offloaded(cfg: RunConfig, is_cuda: bool) -> bool:
    """Return whether the ranks keep their shares of the weights in host memory."""
    return is_cuda and cfg.learner.offload is Offload.OPTIMIZER


def learner_host_parts(cfg: RunConfig, shape: ModelShape, *, is_cuda: bool) -> list[Part]:
    """Return the parts of all ranks together in host memory, for any device."""
    learner = cfg.learner
    parts: list[Part] = []
    if is_offloaded(cfg, is_cuda):
        sharded = _sharded_parts(cfg, shape, is_cuda=is_cuda)
        parts = times(sharded, learner.local_ranks, "ranks")
    row = row_of(
        learner,
        cfg.actor.max_model_len,
        is_cuda=is_cuda,
        is_16_bit=_is_16_bit(learner, is_cuda=is_cuda),
    )
    stored = choose_layers(learner, shape, row, num_layers=shape.layers)
    peak = activation_bytes(shape, row, stored, mlp_chunk_tokens=learner.mlp_chunk_tokens)
    if peak.host_bytes:
        waiting = Part("layer inputs", peak.host_bytes, "learner.activations=offload")
        parts += times([waiting], learner.local_ranks * (1 + _has_own_critic(cfg)), "networks")
    trained = [lora_params(learner.lora, shape) if learner.lora.rank else shape.num_params]
    trained += [shape.num_params] if _has_own_critic(cfg) else []
    per_weight = 4 + adamw_part(learner.moments, 64).num_bytes / 64
    formula = (
        f"{sum(trained) / 1e6:,.1f}M x {per_weight:.4g} B (weights and moments, while they are"
        " written)"
    )
    num_nodes = learner.shard_ranks // learner.local_ranks
    formula += f" / {num_nodes} nodes" * (num_nodes > 1)
    parts.append(Part("checkpoint copies", int(per_weight * sum(trained) / num_nodes), formula))
    versions = 2 * _keeps_versions(cfg)  # The newest one, and as much for its changes at most.
    if learner.hold_back_steps:
        versions += 2 + learner.hold_back_steps  # The engines' one, the next, the held-back.
    copy = _weights("publish copies", shape.num_params, BYTES_OF[cfg.model.dtype])
    total = f"{counted(versions, 'copy', 'copies')} x {copy.formula}"
    copies = replace(copy, num_bytes=versions * copy.num_bytes, formula=total)
    return [*parts, copies] if versions else parts


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
            _frozen_part(cfg, shape, frozen),
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
    if learner.rounding is Rounding.STOCHASTIC:
        of_trained = lora_params(learner.lora, shape) if learner.lora.rank else num
        parts.append(_weights("rounded weights", of_trained, 4, " (learner.rounding=stochastic)"))
    path = cfg.algorithm.reference_path
    is_base = learner.lora.rank > 0 and path in ("", cfg.model.path)
    if cfg.algorithm.kl_coef > 0 and not is_base:
        why = f" ({_name_of(learner, frozen)}; algorithm.kl_coef > 0)"
        parts.append(_weights("reference", num, frozen, why))
        if frozen < 4 and learner.num_ranks == 1 and not is_offloaded(cfg, is_cuda):
            tables = shape.vocab * shape.hidden
            parts.append(_weights("reference table", tables, 4 - frozen, " (fp32)"))
    if _has_own_critic(cfg):
        rest = _weights("critic", num, 8, " (weights, gradients)")
        moments = adamw_part(learner.moments, num)
        parts.append(
            Part(
                "critic", rest.num_bytes + moments.num_bytes, f"{rest.formula} + {moments.formula}"
            )
        )
    of_adapters = ("adapters", "gradients", "optimizer", "rounded weights")
    frac = expert_params(shape) / num if learner.expert_ranks > 1 else 0.0
    return [
        _share(part, learner, 0.0 if learner.lora.rank and part.label in of_adapters else frac)
        for part in parts
    ]


def expert_params(shape: ModelShape) -> int:
    """Return the number of weights of all experts: three matrices each, in every layer."""
    num = 3 * shape.layers * shape.experts * shape.hidden * shape.expert_units
    tables = min(shape.num_params, 2 * shape.vocab * shape.hidden)
    return min(num, shape.num_params - tables)  # The first layers of some networks have none.


def _frozen_part(cfg: RunConfig, shape: ModelShape, width: int) -> Part:
    """Return the memory of the weights beside adapters; `width` bytes for one that is plain."""
    base = cfg.model.base
    num = shape.num_params
    if base is BaseFormat.FULL:
        return _weights("frozen weights", num, width, f" ({_name_of(cfg.learner, width)})")
    tables = min(num, (1 if shape.is_tied else 2) * shape.vocab * shape.hidden)
    rest = num - tables
    per_weight = base.weight_bytes
    formula = f"{rest / 1e6:,.1f}M x {per_weight:.4g} B ({base.value})"
    formula += f" + tables {tables / 1e6:,.1f}M x {width} B"
    return Part("frozen weights", int(rest * per_weight) + tables * width, formula)


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


def _share(part: Part, learner: LearnerSection, expert_frac: float) -> Part:
    """Return the part of one rank; `expert_frac` of it is shared by `learner.expert_ranks`."""
    num_ranks = learner.shard_ranks
    divisor = learner.expert_ranks
    if num_ranks == 1 and not expert_frac:
        return part
    if not expert_frac or num_ranks == divisor:
        return Part(
            part.label, -(-part.num_bytes // num_ranks), f"({part.formula}) / {num_ranks} ranks"
        )
    of_experts = round(part.num_bytes * expert_frac)
    share = -(-(part.num_bytes - of_experts) // num_ranks) - (-of_experts // divisor)
    formula = f"({part.formula}) x ({expert_frac:.3f} experts / {divisor} ranks"
    return Part(part.label, share, f"{formula} + {1 - expert_frac:.3f} / {num_ranks} ranks)")


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
    return Part(
        "optimizer", tables.num_bytes + rest.num_bytes, f"{tables.formula} + {rest.formula}"
    )


def _activation_parts(cfg: RunConfig, shape: ModelShape, *, is_cuda: bool) -> list[Part]:
    """Return estimates. Exact numbers depend on the kernels that torch selects.

    On a CPU, attention is computed with plain products that store the scores of all token pairs. So
    is that of a few families on a GPU.
    """
    learner = cfg.learner
    is_16_bit = _is_16_bit(learner, is_cuda=is_cuda)
    row = row_of(learner, cfg.actor.max_model_len, is_cuda=is_cuda, is_16_bit=is_16_bit)
    tokens = row.tokens
    width = row.width
    stored = choose_layers(learner, shape, row, num_layers=shape.layers)
    peak = activation_bytes(shape, row, stored, mlp_chunk_tokens=learner.mlp_chunk_tokens)
    logits = _logits_part(cfg, shape, row, peak)
    parts = [Part(ACTIVATIONS, peak.num_bytes, peak.formula), logits]
    if _has_own_critic(cfg):
        parts.append(Part(f"{ACTIVATIONS} of the critic", peak.num_bytes, peak.formula))
    is_fused = is_cuda or learner.attention is Attention.FUSED
    if shape.stores_scores or not is_fused:
        layers = max(1, stored.num_stored)
        pairs = 3 * shape.heads * cfg.actor.max_model_len  # Scores, softmax, and its cast.
        depth = counted(layers, "layer")
        formula = f"{tokens:,} tokens x {depth} x {pairs:,} x {width} B, for longest episodes"
        size = tokens * layers * pairs * width
        parts.append(Part("attention scores, at most", size, formula, is_peak=True))
    if cfg.model.base is not BaseFormat.FULL:
        largest = shape.hidden * max(shape.intermediate, shape.heads * shape.head_dim)
        what = " (the largest layer, while it computes)"
        parts.append(_weights("dequantised weights", largest, width, what))
        return parts
    moves = is_offloaded(cfg, is_cuda)
    if learner.num_ranks > 1 or moves:
        tables = min(shape.num_params, 2 * shape.vocab * shape.hidden)
        experts = expert_params(shape) if learner.expert_ranks > 1 else 0
        block = (shape.num_params - tables - experts) // shape.layers
        what = f" (tables {tables / 1e6:,.1f}M, two blocks {2 * block / 1e6:,.1f}M)"
        parts.append(_weights("gathered weights", tables + 2 * block, width, what))
        if experts:
            num_stored = max(1, stored.num_stored)
            parts += _exchange_parts(learner, shape, tokens, width, num_stored)
        if moves:  # fp32; a gradient also in compute precision, and its fp32 sum.
            per_number = frozen_bytes(learner, is_cuda) if learner.lora.rank else 8 + width
            what = " (largest tensor to the GPU, or its gradient to the host)"
            parts.append(_weights("weights in transfer", max(tables, block), per_number, what))
    elif is_16_bit and not (learner.lora.rank and is_cuda):
        name = f"{_name_of(learner)} copies of the weights"
        parts.append(_weights(name, shape.num_params, 2))
    return parts


def _logits_part(cfg: RunConfig, shape: ModelShape, row: RowSizes, peak: ActivationBytes) -> Part:
    """Return the logits of a chunk, as far as they exceed the peak of the layers."""
    chunk_tokens = cfg.learner.logprob_chunk_tokens
    is_fp16 = cfg.model.dtype == "float16" and cfg.learner.precision is Precision.FP16
    # The head has the engine's dtype, but fp16 only in a pass in fp16.
    width = row.width if cfg.model.dtype == "bfloat16" or is_fp16 else 4
    num_bytes = logit_bytes(row, peak, vocab=shape.vocab, chunk_tokens=chunk_tokens, width=width)
    size = f"({row.width} B + 4 B + 4 B)" if row.is_cuda else f"{width} B"
    unused = peak.num_bytes - peak.head_bytes
    less = f", less {unused:,} B that a layer uses at another time" if unused else ""
    rows = min(row.tokens, chunk_tokens)
    return Part("logits", num_bytes, f"{rows:,} tokens x {shape.vocab:,} words x {size}{less}")


def _exchange_parts(
    learner: LearnerSection, shape: ModelShape, tokens: int, width: int, layers: int
) -> list[Part]:
    """Return the memory of tokens from other ranks, and of the experts in the pass's dtype.

    Args:
        layers: layers that store their activations, at least one.
    """
    depth = counted(layers, "layer")
    times = min(shape.intermediate // max(shape.expert_units, 1), learner.expert_ranks)
    formula = f"{tokens:,} tokens x {depth} x {2 * times} x {shape.hidden} x {width} B, even loads"
    num_bytes = 2 * times * tokens * layers * shape.hidden * width
    parts = [Part("tokens of other ranks", num_bytes, formula)]
    if width == 2 and not learner.lora.rank:
        num = expert_params(shape) // learner.expert_ranks * layers // shape.layers
        parts.append(_weights(f"experts in {_name_of(learner)}", num, width, f" ({depth})"))
    return parts


def _is_16_bit(learner: LearnerSection, *, is_cuda: bool) -> bool:
    """Return whether the passes compute in bf16 or in fp16."""
    if learner.precision is Precision.AUTO:
        return is_cuda or has_bf16_units()
    return learner.precision is not Precision.FP32


def _name_of(learner: LearnerSection, width: int = 2) -> str:
    """Return the name of the numbers of `width` bytes that passes compute with."""
    if width > 2:
        return "fp32"
    return "fp16" if learner.precision is Precision.FP16 else "bf16"


def in_phases(parts: Sequence[Part], *, num_engines: int) -> list[Part]:
    """Return the parts of a GPU whose engines sleep during the learner's step.

    Gradients, activations and gathered weights exist during the step. The parts of the engines
    exist while they sample. Weights and moments of the learner exist in both phases.
    """
    marked = [replace(part, phase=_phase_of(part.label)) for part in parts]
    formula = f"about {shown(ASLEEP_BYTES)} for each sleeping engine"
    return [*marked, Part("asleep engines", num_engines * ASLEEP_BYTES, formula, phase=TRAINING)]


def engine_host_parts(cfg: RunConfig, shape: ModelShape) -> list[Part]:
    """Return the host memory of one engine on GPUs: its sleeping weights, and offloaded parts."""
    parts: list[Part] = []
    if cfg.actor.sleep == 1:
        num_bytes, formula = engine_weights(cfg, shape)
        parts.append(Part("engine weights", num_bytes, f"{formula}, while it sleeps"))
    if weights := _gib_argument(cfg, "cpu_offload_gb") * cfg.actor.tensor_parallel_size:
        parts.append(Part("offloaded weights", weights, "cpu_offload_gb for each worker"))
    if cache := _gib_argument(cfg, "kv_offloading_size"):
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
    whole, formula = engine_weights(cfg, shape)
    weights = whole // actor.tensor_parallel_size
    if actor.tensor_parallel_size > 1:
        formula = f"({formula}) / {actor.tensor_parallel_size}"
    parts = [Part("engine weights", weights, formula)]
    fixed = int(_number(cfg, "kv_cache_memory_bytes"))
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
    per_token = max(1, kv_bytes_per_token(cfg, shape) // actor.tensor_parallel_size)
    tokens = num_bytes // per_token
    formula = (
        f"{key}: {tokens:,} tokens of {per_token:,} B,"
        f" {tokens / actor.max_model_len:,.1f} concurrent episodes of {actor.max_model_len:,}"
    )
    return Part("KV cache", num_bytes, formula)


def times(parts: Sequence[Part], number: int, of: str) -> list[Part]:
    """Return the parts of `number` equal owners together; an empty list for 0."""
    if number == 1:
        return list(parts)
    several = [
        replace(
            p,
            num_bytes=number * p.num_bytes,
            formula=f"{number} {of} x ({p.formula})",
            times=number * p.times,
        )
        for p in parts
    ]
    return several if number else []


def shown(num_bytes: float) -> str:
    """Return a size as text."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The memory of one GPU or host, and the parts in it."""

    name: str
    parts: list[Part]
    capacity_bytes: int  # 0 if unknown, or if it is not on this machine.
    remedy: str

    @property
    def total_bytes(self) -> int:
        """The sum of all parts in the phase that needs most, without rare peaks."""
        return _total(self.parts)


def _total(parts: Sequence[Part]) -> int:
    """Return the memory of the phase that needs most."""
    return max(
        sum(part.num_bytes for part in parts if not part.is_peak and part.phase in ("", phase))
        for phase in (SAMPLING, TRAINING)
    )


def make_plan(
    cfg: RunConfig, shape: ModelShape, *, on: Sequence[Gpu], host_bytes: int, num_nodes: int = 1
) -> list[MemoryBudget]:
    """Return the memory use of each used GPU and of each node's host.

    Args:
        on: the GPUs of all nodes; each node has the same number.
        host_bytes: memory of each host; 0 if unknown.

    Raises: ConfigError: there are too few GPUs, or a role would use GPUs of two nodes.
    """
    cfg = with_activation_room(cfg, shape, on=on, host_bytes=host_bytes, num_nodes=num_nodes)
    is_cuda = trains_on_gpu(cfg, num_gpus=len(on))
    num_gpus = len(on) or max(cfg.learner.local_ranks, cfg.actor.tensor_parallel_size)
    per_node = num_gpus // num_nodes
    assignment = assign_gpus(cfg, num_gpus=num_gpus) if on or is_cuda else None
    if assignment is not None:
        _check_nodes(cfg, assignment, per_node)
    served = served_engines(
        cfg, assignment=assignment if on else None, num_gpus=len(on) // num_nodes
    )
    beside = [part for each in served if not each.gpus for part in served_parts(each, None)]
    first, other = (learner_parts(cfg, shape, is_cuda=is_cuda, rank=rank) for rank in (0, 1))
    of_learner = learner_host_parts(cfg, shape, is_cuda=is_cuda)
    if not is_cuda:
        of_learner = [*first, *times(other, cfg.learner.local_ranks - 1, "ranks"), *of_learner]
    if assignment is None:
        programs = _programs(cfg, cfg.learner.local_ranks, cfg.actor.num_engines)
        host = [*of_learner, *cpu_engines_parts(cfg, shape), programs, *beside]
        return [MemoryBudget("host", host, host_bytes, HOST_REMEDY)]
    places: list[MemoryBudget] = []
    for i in sorted(used_gpus(assignment).union(*(engine.gpus for engine in served))):
        capacity = on[i].memory_bytes if i < len(on) else 0
        parts: list[Part] = []
        if i in assignment.learner:
            parts += other if assignment.learner.index(i) else first
        if num_engines := sum(i in engine for engine in assignment.actors):
            parts += gpu_engine_parts(cfg, shape, capacity, num_engines=num_engines)
            if cfg.actor.sleep and i in assignment.learner:
                parts = in_phases(parts, num_engines=num_engines)
        name = f"gpu {i % per_node}" + (f" ({on[i].name})" if i < len(on) and on[i].name else "")
        name = f"node {i // per_node}, {name}" if num_nodes > 1 else name
        remedy = GPU_REMEDY
        if i in assignment.learner:
            rank = assignment.learner.index(i)
            remedy += _offload_remedy(cfg, shape, parts, rank, capacity, host_bytes)
        for engine in (engine for engine in served if i in engine.gpus):
            if not parts:
                remedy = f"choose a smaller model, or lower {FRAC} in {engine.section}.serve"
            parts += served_parts(engine, on[i])
        places.append(MemoryBudget(name, parts, capacity, remedy))
    for node in range(num_nodes):
        is_first = node == 0
        host = list(of_learner) if is_first else []
        num_engines = sum(engine[0] // per_node == node for engine in assignment.actors)
        host.append(_programs(cfg, cfg.learner.local_ranks if is_first else 0, num_engines))
        host += times(engine_host_parts(cfg, shape), num_engines, "engines")
        host += beside if is_first else []
        name = f"node {node}, host" if num_nodes > 1 else "host"
        places.append(MemoryBudget(name, host, host_bytes, HOST_REMEDY))
    return places


def with_activation_room(
    cfg: RunConfig, shape: ModelShape, *, on: Sequence[Gpu], host_bytes: int, num_nodes: int = 1
) -> RunConfig:
    """Return the config with the budget of `learner.activations=auto`, if not all can be stored.

    The budget is the memory that the other parts leave on the fullest GPU of the learner, or on the
    host, for each rank.

    Args:
        on, host_bytes, num_nodes: as of `make_plan`.
    """
    learner = cfg.learner
    if learner.activations is not Activations.AUTO or learner.activation_gib:
        return cfg
    keeping = replace(cfg, learner=replace(learner, activations=Activations.KEEP))
    places = make_plan(keeping, shape, on=on, host_bytes=host_bytes, num_nodes=num_nodes)
    rooms: list[float] = []
    for place in places:
        rows = [part for part in place.parts if part.label.startswith(ACTIVATIONS)]
        if not rows or not place.capacity_bytes:
            continue
        of_step = [part for part in place.parts if part.phase in ("", TRAINING)]
        others = sum(part.num_bytes for part in of_step if not part.is_peak and part not in rows)
        num_bytes = sum(part.num_bytes for part in rows)
        usable = place.capacity_bytes * (1 - RESERVED_FRAC)
        if others + num_bytes > usable:
            rooms.append((usable - others) / sum(part.times for part in rows))
    if not rooms:
        return cfg
    budget = max(0.01, math.floor(min(rooms) / GIB * 100) / 100)
    return replace(cfg, learner=replace(learner, activation_gib=budget))


def settle_activations(cfg: RunConfig) -> RunConfig:
    """Return the config of a run with the budget of `learner.activations=auto` on this machine."""
    shape = read_shape(ROOT / cfg.model.path)
    settled = with_activation_room(
        _with_precision(cfg), shape, on=gpus(), host_bytes=memory_bytes()[0]
    )
    budget = settled.learner.activation_gib
    return replace(cfg, learner=replace(cfg.learner, activation_gib=budget))


def _offload_remedy(
    cfg: RunConfig,
    shape: ModelShape,
    parts: Sequence[Part],
    rank: int,
    capacity_bytes: int,
    host_bytes: int,
) -> str:
    """Return a hint with the memory use after offloading; "" if offloading does not help."""
    learner = cfg.learner
    if learner.offload is Offload.OPTIMIZER or learner.optimizer is OptimizerKind.MUON:
        return ""
    # Such settings are refused.
    if learner.expert_ranks > 1 or learner.lora.is_merged or cfg.model.base is not BaseFormat.FULL:
        return ""
    offloaded = replace(learner, offload=Offload.OPTIMIZER, moments=Moments.FP32)
    other = replace(cfg, learner=offloaded)
    before, after = (learner_parts(each, shape, is_cuda=True, rank=rank) for each in (cfg, other))
    here = _total(parts) - _total(before) + _total(after)
    if here > capacity_bytes:
        return ""
    host = _total(learner_host_parts(other, shape, is_cuda=True))
    has = f", which has {shown(host_bytes)}" if host_bytes else ""
    exact = " learner.moments=fp32" if learner.moments is Moments.INT8 else ""
    return (
        f"; learner.offload=optimizer{exact} would need about {shown(here)} of GPU memory and"
        f" {shown(host)} of host memory{has}"
    )


def _check_nodes(cfg: RunConfig, assignment: GpuAssignment, per_node: int) -> None:
    """Refuse a learner or an engine on GPUs of two nodes."""
    if assignment.learner and assignment.learner[-1] >= per_node:
        ranks = counted(cfg.learner.local_ranks, "rank runs", "ranks run")
        raise ConfigError(
            f"learner.num_ranks={cfg.learner.num_ranks}: {ranks} on one node, and a node has"
            f" {counted(per_node, 'GPU')}. Raise learner.num_nodes, which is"
            f" {cfg.learner.num_nodes}"
        )
    actor = cfg.actor
    engine = f"actor.tensor_parallel_size={actor.tensor_parallel_size}: an engine"
    process = (
        f"actor.engines_per_process={actor.engines_per_process}: the engines of an actor process"
    )
    for owner, owned in ((engine, assignment.actors), (process, assignment.processes)):
        if any(len({gpu // per_node for gpu in numbers}) > 1 for numbers in owned):
            raise ConfigError(
                f"{owner} would use GPUs of two nodes, which have {per_node} each. Use a divisor"
                " of the number of GPUs that the learner leaves free"
            )


def _programs(cfg: RunConfig, num_ranks: int, num_engines: int) -> Part:
    """Return the memory of all processes beside weights and caches."""
    # A single worker runs in the engine's own process. Several workers have one process each.
    width = cfg.actor.tensor_parallel_size
    num_actors = -(-num_engines // cfg.actor.engines_per_process)
    num = num_ranks + num_actors + (1 if width == 1 else 1 + width) * num_engines
    formula = f"{num} processes of learner, actors and engines x {shown(PROCESS_BYTES)}"
    return Part("programs", num * PROCESS_BYTES, formula)


def is_elsewhere(cfg: RunConfig) -> bool:
    """Return whether to plan for the config's machine, because this one has no GPU."""
    return cfg.machine.num_gpus > 0 and cfg.learner.device != "cpu" and not gpus()


def plan_here(cfg: RunConfig) -> list[MemoryBudget]:
    """Return the plan for this machine, or for the config's machine (see `is_elsewhere`).

    Raises: ConfigError: there are too few GPUs.
    """
    shape = read_shape(ROOT / cfg.model.path)
    visible = gpus()
    cfg = _with_precision(cfg)
    if is_elsewhere(cfg):
        return plan_named(cfg, shape)
    try:
        return make_plan(cfg, shape, on=visible, host_bytes=memory_bytes()[0])
    except ConfigError as error:
        if not cfg.machine.num_gpus:
            raise
        needed = sum(each.total_bytes for each in plan_named(cfg, shape) if "gpu" in each.name)
        has = sum(gpu.memory_bytes for gpu in visible)
        raise ConfigError(
            f"{error}. This configuration is made for {cfg.machine.text} and needs about"
            f" {shown(needed)} of GPU memory; the GPUs of this machine have {shown(has)}. Change"
            " learner.num_gpus and actor.num_gpus"
        ) from error


def _with_precision(cfg: RunConfig) -> RunConfig:
    """Return the config with the precision and rounding that a start would choose."""
    num_gpus = len(_named_gpus(cfg) if is_elsewhere(cfg) else gpus())
    is_cuda = trains_on_gpu(cfg, num_gpus=num_gpus)
    folder = ROOT / cfg.model.path
    dtype = cfg.model.dtype
    choice = choose_precision(cfg.learner, folder, is_cuda=is_cuda, engine_dtype=dtype)
    settled = replace(cfg.learner, precision=choice.precision, rounding=choice.rounding)
    return replace(cfg, learner=settled)


def plan_named(cfg: RunConfig, shape: ModelShape) -> list[MemoryBudget]:
    """Return the plan for the machine that the config describes."""
    machine = cfg.machine
    return make_plan(
        cfg,
        shape,
        on=_named_gpus(cfg),
        host_bytes=int(machine.host_memory_gib * GIB),
        num_nodes=machine.num_nodes,
    )


def _named_gpus(cfg: RunConfig) -> tuple[Gpu, ...]:
    machine = cfg.machine
    gpu = Gpu(name="", memory_bytes=int(machine.gpu_memory_gib * GIB))
    return (gpu,) * (machine.num_nodes * machine.num_gpus)


def served_parts(engine: ServedEngine, gpu: Gpu | None) -> list[Part]:
    """Return the memory of an engine on a host, or on each of its GPUs.

    Args:
        gpu: None for an engine without a GPU.

    Raises: ConfigError: a setting that the plan reads is no number.
    """
    shape = read_shape(engine.folder)
    parted = (setting.partition("=") for setting in engine.settings)
    settings = {key: value for key, _, value in parted}
    width = BYTES_OF.get(settings.get("model.dtype", ""), 2)
    num_gpus = max(1, len(engine.gpus))
    weights = shape.num_params * width // num_gpus
    shared = f" / {num_gpus} GPUs" if num_gpus > 1 else ""
    formula = f"{shape.num_params / 1e6:,.1f}M x {width} B{shared}"
    parts = [Part(f"{engine.role} weights", weights, formula)]
    key, default, kind = FRAC, "0.85", float
    if gpu is None:
        key, default, kind = "actor.kv_cache_gib", "1", int
    try:
        value = kind(settings.get(key, default))
    except ValueError as error:
        expected = "a whole number" if kind is int else "a number"
        where = f"{engine.section}.serve=[{key}={settings[key]}]"
        raise ConfigError(f"{where}: expects {expected}") from error
    if gpu is None:
        cache = Part(f"{engine.role} KV cache", int(value * GIB), f"{key}={value}")
        programs = Part(f"{engine.role} programs", 2 * PROCESS_BYTES, "2 processes of its engine")
        return [*parts, cache, programs]
    rest = max(0, int(value * gpu.memory_bytes) - weights)
    formula = f"the rest of {key}={value:g} of its engine"
    return [*parts, Part(f"{engine.role} cache, work space", rest, formula)]


def plan_lines(places: Sequence[MemoryBudget]) -> list[str]:
    """Return the plan as a table. Equal neighbours are merged into one entry."""
    lines: list[str] = []
    for _, group in groupby(places, key=lambda p: (p.parts, p.capacity_bytes, p.remedy)):
        place, *equal = group
        of = f" of {shown(place.capacity_bytes)}" if place.capacity_bytes else ""
        to = f" and {counted(len(equal), 'equal one')}, up to {equal[-1].name}" if equal else ""
        lines.append(f"memory, {place.name}{to}: about {shown(place.total_bytes)}{of}")
        for part in place.parts:
            phase = f"; only while {part.phase}" if part.phase else ""
            lines.append(f"  {shown(part.num_bytes):>9}  {part.label:<27}  {part.formula}{phase}")
    return lines


def lines_here(cfg: RunConfig) -> list[str]:
    """Return the plan for this machine, or for the config's machine, as a table."""
    places = plan_lines(plan_here(cfg))
    if is_elsewhere(cfg):
        places.insert(0, f"This machine has no GPU. Plan for the target, {cfg.machine.text}:")
    if names := uncounted(cfg):
        places.append(f"memory, not counted: {', '.join(names)}")
    shape = read_shape(ROOT / cfg.model.path)
    if shape.num_unused:
        places.append(
            f"memory, not loaded: {shape.num_unused / 1e6:,.1f}M weights beside the"
            f" {shape.num_params / 1e6:,.1f}M of the language model, such as towers for images;"
            " checkpoints have them unchanged"
        )
    return places


def check_memory(cfg: RunConfig, places: Sequence[MemoryBudget], shape: ModelShape) -> None:
    """Check that the plan fits in this machine's memory; unknown sizes are skipped.

    Raises: ConfigError: a memory is too small, or the engine's cache cannot hold one episode.
    """
    for place in places:
        if place.capacity_bytes and place.total_bytes > place.capacity_bytes:
            largest = sorted(place.parts, key=lambda p: (p.is_peak, -p.num_bytes))[:3]
            most = "; ".join(f"{p.label} {shown(p.num_bytes)} = {p.formula}" for p in largest)
            raise ConfigError(
                f"memory: the run needs about {shown(place.total_bytes)} on {place.name}, which"
                f" has {shown(place.capacity_bytes)} ({most}). Remedies: {place.remedy}"
            )
        _check_cache(cfg, place, shape)


def _check_cache(cfg: RunConfig, place: MemoryBudget, shape: ModelShape) -> None:
    """Refuse a cache that is too small for one longest episode; vLLM would refuse it later."""
    per_token = kv_bytes_per_token(cfg, shape) // cfg.actor.tensor_parallel_size
    needed = per_token * cfg.actor.max_model_len
    for part in place.parts:
        cache = part.num_bytes // part.times
        if part.label == "KV cache" and cache < needed:
            raise ConfigError(
                f"actor.max_model_len={cfg.actor.max_model_len}: an episode of this length needs"
                f" {shown(needed)} of KV cache ({per_token:,} B per token), and the engine on"
                f" {place.name} has {shown(cache)}. Lower actor.max_model_len, or raise"
                f" {'actor.gpu_memory_frac' if 'gpu' in place.name else 'actor.kv_cache_gib'}"
            )
