"""The memory that a run will take, part by part with its arithmetic, before anything is loaded."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.checks.machine import GIB, Gpu, gpus, has_bf16_units, memory_bytes
from common.checks.model_shape import BYTES_OF, ModelShape, read_shape
from common.config.learning import Advantage, CriticKind, OptimizerKind, Precision
from common.config.run_config import ActorSection, LearnerSection, RunConfig
from common.errors import ConfigError

PUBLISH_COPIES = 3  # the version that engines have, the next one, and its tensors while cast
PROCESS_BYTES = 1 * GIB  # torch and vLLM themselves; measured 0.7-1.1 GiB a process
ENGINE_WORK_BYTES = 3 * GIB // 2  # of a GPU engine beside weights and cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One line of the plan."""

    label: str
    num_bytes: int
    how: str  # the arithmetic
    is_peak: bool = False  # taken only while the longest episodes are trained on; not judged


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A memory and what is put there."""

    name: str
    parts: list[Part]
    capacity_bytes: int  # 0: not on this machine, or nobody tells
    remedy: str

    @property
    def total_bytes(self) -> int:
        """What all parts take together, rare peaks left out."""
        return sum(part.num_bytes for part in self.parts if not part.is_peak)


def make_plan(
    cfg: RunConfig, shape: ModelShape, *, on: Sequence[Gpu], host_bytes: int
) -> list[Place]:
    """Return what lies where: on each GPU that a role uses, and in the host's memory.

    Args:
        on: the GPUs of this machine.
        host_bytes: its memory, 0 if unknown.
    """
    is_cuda = cfg.learner.device == "cuda" or (cfg.learner.device == "auto" and bool(on))
    learner = _learner_parts(cfg, shape, is_cuda=is_cuda)
    num_learners = cfg.learner.num_ranks if is_cuda else 0
    on_gpu = bool(on) or cfg.learner.device == "cuda"  # the engine goes where vLLM finds a device
    num_engines = (cfg.actor.tensor_parallel_size if cfg.actor.num_actors else 0) if on_gpu else 0
    places: list[Place] = []
    for i in range(max(num_learners, num_engines)):
        capacity = on[i].memory_bytes if i < len(on) else 0
        parts = list(learner) if i < num_learners else []
        if i < num_engines:
            parts += _gpu_engine_parts(cfg, shape, capacity)
        name = f"gpu {i}" + (f" ({on[i].name})" if i < len(on) else "")
        remedy = (
            "lower actor.gpu_memory_frac or learner.max_tokens_per_microbatch, set"
            " learner.gradient_checkpointing=true, or take GPUs with more memory"
        )
        places.append(Place(name=name, parts=parts, capacity_bytes=capacity, remedy=remedy))
    host = [] if is_cuda else _times(learner, cfg.learner.num_ranks, "ranks")
    host += [] if on_gpu else _times(_cpu_engine_parts(cfg, shape), cfg.actor.num_actors, "actors")
    num_processes = cfg.learner.num_ranks + 2 * cfg.actor.num_actors
    how = f"{num_processes} processes x {_shown(PROCESS_BYTES)}: learner, actors, their engines"
    host.append(Part(label="programs", num_bytes=num_processes * PROCESS_BYTES, how=how))
    remedy = (
        "lower learner.max_tokens_per_microbatch, actor.kv_cache_gib, actor.num_actors or"
        " learner.num_ranks, or set learner.gradient_checkpointing=true"
    )
    places.append(Place(name="host", parts=host, capacity_bytes=host_bytes, remedy=remedy))
    return places


def _learner_parts(cfg: RunConfig, shape: ModelShape, *, is_cuda: bool) -> list[Part]:
    learner, num = cfg.learner, shape.num_params
    n = f"{num / 1e6:,.1f}M"
    parts = [
        Part(label="learner weights", num_bytes=4 * num, how=f"{n} x 4 B (fp32 master)"),
        Part(label="gradients", num_bytes=4 * num, how=f"{n} x 4 B"),
        _optimizer_part(learner, shape),
    ]
    if cfg.algorithm.kl_coef > 0:
        how = f"{n} x 4 B (algorithm.kl_coef > 0)"
        parts.append(Part(label="reference", num_bytes=4 * num, how=how))
    is_critic = cfg.algorithm.advantage is Advantage.PPO
    if is_critic and learner.critic.kind is CriticKind.MODEL:
        how = f"{n} x 16 B (weights, gradients, two moments)"
        parts.append(Part(label="critic", num_bytes=16 * num, how=how))
    width = BYTES_OF[cfg.model.dtype]
    versions = PUBLISH_COPIES + learner.hold_back_steps
    how = f"{versions} copies x {n} x {width} B ({cfg.model.dtype})"
    copies = Part(label="publish copies", num_bytes=versions * width * num, how=how)
    return [*parts, *_activation_parts(cfg, shape, is_cuda=is_cuda), copies]


def _optimizer_part(learner: LearnerSection, shape: ModelShape) -> Part:
    num = shape.num_params
    if learner.optimizer is OptimizerKind.ADAMW:
        return Part(label="optimizer", num_bytes=8 * num, how=f"{num / 1e6:,.1f}M x 8 B (AdamW)")
    tables = min(num, 2 * shape.vocab * shape.hidden)
    rest = num - tables
    how = f"{tables / 1e6:,.1f}M x 8 B (AdamW, tables) + {rest / 1e6:,.1f}M x 4 B (Muon)"
    return Part(label="optimizer", num_bytes=8 * tables + 4 * rest, how=how)


def _activation_parts(cfg: RunConfig, shape: ModelShape, *, is_cuda: bool) -> list[Part]:
    """Return estimates: exact numbers depend on the kernels that torch picks.

    On a CPU attention is computed as plain products, which keep the scores of every pair.
    """
    learner = cfg.learner
    tokens = max(learner.max_tokens_per_microbatch, cfg.actor.max_model_len)
    is_bf16 = learner.precision is Precision.BF16
    if learner.precision is Precision.AUTO:
        is_bf16 = is_cuda or has_bf16_units()
    width = 2 if is_bf16 else 4
    attention = (shape.heads + 2 * shape.kv_heads) * shape.head_dim + shape.heads * shape.head_dim
    layer = 6 * shape.hidden + attention + 3 * shape.intermediate  # numbers kept per token
    if learner.gradient_checkpointing:
        per_token = shape.layers * shape.hidden + layer
        how = f"{tokens:,} tokens x ({shape.layers} layers x {shape.hidden} + one layer {layer:,})"
    else:
        per_token = shape.layers * layer
        how = f"{tokens:,} tokens x {shape.layers} layers x {layer:,}"
    rows = min(tokens, learner.logprob_chunk_tokens)
    num_copies = 2 * shape.num_params if is_bf16 else 0
    parts = [
        Part(label="activations", num_bytes=tokens * per_token * width, how=f"{how} x {width} B"),
        Part(
            label="logits",
            num_bytes=3 * 4 * rows * shape.vocab,
            how=f"{rows:,} tokens x {shape.vocab:,} words x 4 B x 3",
        ),
    ]
    if not is_cuda:
        layers = 1 if learner.gradient_checkpointing else shape.layers
        pairs = 3 * shape.heads * cfg.actor.max_model_len  # scores, softmax, its cast
        how = f"{tokens:,} tokens x {layers} layers x {pairs:,} x {width} B, of longest episodes"
        size = tokens * layers * pairs * width
        parts.append(Part(label="attention scores, at most", num_bytes=size, how=how, is_peak=True))
    if num_copies:
        how = f"{shape.num_params / 1e6:,.1f}M x 2 B"
        parts.append(Part(label="bf16 copies of the weights", num_bytes=num_copies, how=how))
    return parts


def _cpu_engine_parts(cfg: RunConfig, shape: ModelShape) -> list[Part]:
    width, n = BYTES_OF[cfg.model.dtype], f"{shape.num_params / 1e6:,.1f}M"
    cache = cfg.actor.kv_cache_gib * GIB
    weights = width * shape.num_params
    return [
        Part(label="engine weights", num_bytes=weights, how=f"{n} x {width} B"),
        Part(label="incoming weights", num_bytes=weights, how=f"{n} x {width} B, while they load"),
        _cache_part(cfg.actor, shape, cfg.model.dtype, cache, "actor.kv_cache_gib"),
    ]


def _gpu_engine_parts(cfg: RunConfig, shape: ModelShape, capacity_bytes: int) -> list[Part]:
    """Return what one worker of the engines holds on a GPU; vLLM takes its share at the start."""
    actor, width = cfg.actor, BYTES_OF[cfg.model.dtype]
    weights = width * shape.num_params // actor.tensor_parallel_size
    n = f"{shape.num_params / 1e6:,.1f}M / {actor.tensor_parallel_size}"
    share = int(actor.gpu_memory_frac * capacity_bytes)
    parts = [Part(label="engine weights", num_bytes=weights, how=f"{n} x {width} B")]
    if capacity_bytes:
        cache = max(0, share - weights - ENGINE_WORK_BYTES)
        key = f"the rest of actor.gpu_memory_frac={actor.gpu_memory_frac:g}"
        work = Part(label="engine work space", num_bytes=ENGINE_WORK_BYTES, how="about")
        parts += [work, _cache_part(actor, shape, cfg.model.dtype, cache, key)]
    incoming = Part(label="incoming weights", num_bytes=weights, how=f"{n} x {width} B")
    return [*_times(parts, actor.num_actors, "actors"), incoming]


def _cache_part(
    actor: ActorSection, shape: ModelShape, dtype: str, num_bytes: int, key: str
) -> Part:
    each = max(1, shape.kv_bytes_per_token(dtype) // actor.tensor_parallel_size)
    tokens = num_bytes // each
    how = (
        f"{key}: {tokens:,} tokens of {each:,} B,"
        f" {tokens / actor.max_model_len:,.1f} episodes of {actor.max_model_len:,} at once"
    )
    return Part(label="KV cache", num_bytes=num_bytes, how=how)


def _times(parts: Sequence[Part], number: int, of: str) -> list[Part]:
    if number == 1:
        return list(parts)
    return [
        Part(label=p.label, num_bytes=number * p.num_bytes, how=f"{number} {of} x ({p.how})")
        for p in parts
        if number
    ]


def plan_here(cfg: RunConfig, root: Path) -> list[Place]:
    """Return the plan of a run on this machine."""
    shape = read_shape(root / cfg.model.path)
    return make_plan(cfg, shape, on=gpus(), host_bytes=memory_bytes()[0])


def plan_lines(places: Sequence[Place]) -> list[str]:
    """Return the plan as a table."""
    lines: list[str] = []
    for place in places:
        of = f" of {_shown(place.capacity_bytes)}" if place.capacity_bytes else ""
        lines.append(f"memory, {place.name}: about {_shown(place.total_bytes)}{of}")
        lines += [f"  {_shown(p.num_bytes):>9}  {p.label:<27}  {p.how}" for p in place.parts]
    return lines


def lines_here(cfg: RunConfig, root: Path) -> list[str]:
    """Return the plan of a run on this machine as a table."""
    return plan_lines(plan_here(cfg, root))


def check_memory(cfg: RunConfig, places: Sequence[Place], shape: ModelShape) -> None:
    """Return if the plan fits in the memories of this machine, as far as they are here.

    Raises:
        ConfigError: a memory is too small, or the engine's cache for a single episode.
    """
    for place in places:
        if place.capacity_bytes and place.total_bytes > place.capacity_bytes:
            largest = sorted(place.parts, key=lambda p: (p.is_peak, -p.num_bytes))[:3]
            most = "; ".join(f"{p.label} {_shown(p.num_bytes)} = {p.how}" for p in largest)
            raise ConfigError(
                f"memory: the run needs about {_shown(place.total_bytes)} on {place.name}, which"
                f" has {_shown(place.capacity_bytes)} ({most}); {place.remedy}"
            )
        _check_cache(cfg, place, shape)


def _check_cache(cfg: RunConfig, place: Place, shape: ModelShape) -> None:
    """Refuse what vLLM would refuse later: a cache that does not hold one longest episode."""
    each = shape.kv_bytes_per_token(cfg.model.dtype) // cfg.actor.tensor_parallel_size
    needed = each * cfg.actor.max_model_len
    for part in place.parts:
        found = part.num_bytes // max(1, cfg.actor.num_actors)
        if part.label == "KV cache" and found < needed:
            raise ConfigError(
                f"actor.max_model_len={cfg.actor.max_model_len}: one such episode needs"
                f" {_shown(needed)} of KV cache ({each:,} B a token) and the engine on"
                f" {place.name} has {_shown(found)}; lower it, or raise"
                f" {'actor.kv_cache_gib' if place.name == 'host' else 'actor.gpu_memory_frac'}"
            )


def _shown(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"
