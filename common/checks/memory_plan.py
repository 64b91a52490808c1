"""The memory that a run will take, part by part with its arithmetic, before anything is loaded."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.checks.gpu_placement import seat, trains_on_gpu
from common.checks.machine import GIB, Gpu, gpus, has_bf16_units, memory_bytes
from common.checks.model_shape import BYTES_OF, ModelShape, read_shape
from common.config.learning import Advantage, CriticKind, OptimizerKind, Precision
from common.config.run_config import ActorSection, LearnerSection, RunConfig
from common.errors import ConfigError

PUBLISH_COPIES = 2  # the version that engines have and the next one
PROCESS_BYTES = 1 * GIB  # torch and vLLM themselves; measured 0.7-1.1 GiB a process
ENGINE_WORK_BYTES = 3 * GIB // 2  # of a GPU engine beside weights and cache
GPU_REMEDY = (
    "lower actor.gpu_memory_frac or learner.max_tokens_per_microbatch, set"
    " learner.gradient_checkpointing=true, or take GPUs with more memory"
)
HOST_REMEDY = (
    "lower learner.max_tokens_per_microbatch, actor.kv_cache_gib, actor.num_actors or"
    " learner.num_ranks, or set learner.gradient_checkpointing=true"
)


@dataclass(frozen=True, slots=True)
class Part:
    """One line of the plan."""

    label: str
    num_bytes: int
    how: str  # the arithmetic
    is_peak: bool = False  # taken only while the longest episodes are trained on; not judged


@dataclass(frozen=True, slots=True)
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
    """Return what lies where: on each GPU that a role uses, and in the host's (0: unknown)."""
    is_cuda = trains_on_gpu(cfg, num_gpus=len(on))
    first, other = (_learner_parts(cfg, shape, is_cuda=is_cuda, rank=rank) for rank in (0, 1))
    num_ranks = cfg.learner.num_ranks
    on_gpu = bool(on) or is_cuda  # the engine goes where vLLM finds a device
    places: list[Place] = []
    if on_gpu:
        num_gpus = len(on) or max(num_ranks, cfg.actor.tensor_parallel_size)
        seats = seat(cfg, num_gpus=num_gpus)
        for i in sorted({*seats.learner, *(gpu for own in seats.actors for gpu in own)}):
            capacity = on[i].memory_bytes if i < len(on) else 0
            parts: list[Part] = []
            if i in seats.learner:
                parts += other if seats.learner.index(i) else first
            if num_engines := sum(i in own for own in seats.actors):
                parts += _gpu_engine_parts(cfg, shape, capacity, num_engines=num_engines)
            name = f"gpu {i}" + (f" ({on[i].name})" if i < len(on) else "")
            places.append(Place(name, parts, capacity, GPU_REMEDY))
    host = [] if is_cuda else [*first, *_times(other, num_ranks - 1, "ranks")]
    host += [] if on_gpu else _times(_cpu_engine_parts(cfg, shape), cfg.actor.num_actors, "actors")
    num_processes = num_ranks + 2 * cfg.actor.num_actors
    how = f"{num_processes} processes x {_shown(PROCESS_BYTES)}: learner, actors, their engines"
    host.append(Part("programs", num_processes * PROCESS_BYTES, how))
    return [*places, Place("host", host, host_bytes, HOST_REMEDY)]


def _weights(label: str, num: int, width: int, note: str = "") -> Part:
    return Part(label, num * width, f"{num / 1e6:,.1f}M x {width} B{note}")


def _learner_parts(cfg: RunConfig, shape: ModelShape, *, is_cuda: bool, rank: int) -> list[Part]:
    """Return what one rank holds: its share of what is sharded; the first also publishes."""
    learner, num = cfg.learner, shape.num_params
    sharded = [
        _weights("learner weights", num, 4, " (fp32 master)"),
        _weights("gradients", num, 4),
        _optimizer_part(learner, shape),
    ]
    if cfg.algorithm.kl_coef > 0:
        sharded.append(_weights("reference", num, 4, " (algorithm.kl_coef > 0)"))
    is_critic = cfg.algorithm.advantage is Advantage.PPO
    if is_critic and learner.critic.kind is CriticKind.MODEL:
        sharded.append(_weights("critic", num, 16, " (weights, gradients, two moments)"))
    parts = [_share(part, learner.num_ranks) for part in sharded]
    parts += _activation_parts(cfg, shape, is_cuda=is_cuda)
    if rank > 0:
        return parts
    versions, width = PUBLISH_COPIES + learner.hold_back_steps, BYTES_OF[cfg.model.dtype]
    copy = _weights("publish copies", num, width, f" ({cfg.model.dtype})")
    return [*parts, Part(copy.label, versions * copy.num_bytes, f"{versions} copies x {copy.how}")]


def _share(part: Part, num_ranks: int) -> Part:
    if num_ranks == 1:
        return part
    return Part(part.label, -(-part.num_bytes // num_ranks), f"({part.how}) / {num_ranks} ranks")


def _optimizer_part(learner: LearnerSection, shape: ModelShape) -> Part:
    num = shape.num_params
    if learner.optimizer is OptimizerKind.ADAMW:
        return _weights("optimizer", num, 8, " (AdamW)")
    tables = _weights("", min(num, 2 * shape.vocab * shape.hidden), 8, " (AdamW, tables)")
    rest = _weights("", num - tables.num_bytes // 8, 4, " (Muon)")
    return Part("optimizer", tables.num_bytes + rest.num_bytes, f"{tables.how} + {rest.how}")


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
    attention = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    layer = 6 * shape.hidden + attention + 3 * shape.intermediate  # numbers kept per token
    per_token, how = shape.layers * layer, f"{tokens:,} tokens x {shape.layers} layers x {layer:,}"
    if learner.gradient_checkpointing:
        per_token = shape.layers * shape.hidden + layer
        how = f"{tokens:,} tokens x ({shape.layers} layers x {shape.hidden} + one layer {layer:,})"
    rows = min(tokens, learner.logprob_chunk_tokens)
    logits = f"{rows:,} tokens x {shape.vocab:,} words x 4 B x 3"
    parts = [
        Part("activations", tokens * per_token * width, f"{how} x {width} B"),
        Part("logits", 3 * 4 * rows * shape.vocab, logits),
    ]
    if not is_cuda:
        layers = 1 if learner.gradient_checkpointing else shape.layers
        pairs = 3 * shape.heads * cfg.actor.max_model_len  # scores, softmax, its cast
        how = f"{tokens:,} tokens x {layers} layers x {pairs:,} x {width} B, of longest episodes"
        size = tokens * layers * pairs * width
        parts.append(Part("attention scores, at most", size, how, is_peak=True))
    if learner.num_ranks > 1:
        tables = min(shape.num_params, 2 * shape.vocab * shape.hidden)
        block = (shape.num_params - tables) // shape.layers
        what = f" (tables {tables / 1e6:,.1f}M, two blocks {2 * block / 1e6:,.1f}M)"
        parts.append(_weights("weights put together", tables + 2 * block, width, what))
    elif is_bf16:
        parts.append(_weights("bf16 copies of the weights", shape.num_params, 2))
    return parts


def _cpu_engine_parts(cfg: RunConfig, shape: ModelShape) -> list[Part]:
    width, cache = BYTES_OF[cfg.model.dtype], cfg.actor.kv_cache_gib * GIB
    return [
        _weights("engine weights", shape.num_params, width),
        _weights("incoming weights", shape.num_params, width, ", while they load"),
        _cache_part(cfg.actor, shape, cfg.model.dtype, cache, "actor.kv_cache_gib"),
    ]


def _gpu_engine_parts(
    cfg: RunConfig, shape: ModelShape, capacity_bytes: int, *, num_engines: int
) -> list[Part]:
    """Return what the workers of engines hold on a GPU; vLLM takes its share at the start."""
    actor, width = cfg.actor, BYTES_OF[cfg.model.dtype]
    weights = width * shape.num_params // actor.tensor_parallel_size
    how = f"{shape.num_params / 1e6:,.1f}M / {actor.tensor_parallel_size} x {width} B"
    parts = [Part("engine weights", weights, how)]
    if capacity_bytes:
        share = int(actor.gpu_memory_frac * capacity_bytes)
        cache = max(0, share - weights - ENGINE_WORK_BYTES)
        key = f"the rest of actor.gpu_memory_frac={actor.gpu_memory_frac:g}"
        parts.append(Part("engine work space", ENGINE_WORK_BYTES, "about"))
        parts.append(_cache_part(actor, shape, cfg.model.dtype, cache, key))
    return [*_times(parts, num_engines, "actors"), Part("incoming weights", weights, how)]


def _cache_part(
    actor: ActorSection, shape: ModelShape, dtype: str, num_bytes: int, key: str
) -> Part:
    each = max(1, shape.kv_bytes_per_token(dtype) // actor.tensor_parallel_size)
    tokens = num_bytes // each
    how = (
        f"{key}: {tokens:,} tokens of {each:,} B,"
        f" {tokens / actor.max_model_len:,.1f} episodes of {actor.max_model_len:,} at once"
    )
    return Part("KV cache", num_bytes, how)


def _times(parts: Sequence[Part], number: int, of: str) -> list[Part]:
    if number == 1:
        return list(parts)
    several = [Part(p.label, number * p.num_bytes, f"{number} {of} x ({p.how})") for p in parts]
    return several if number else []


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

    Raises: ConfigError: a memory is too small, or the engine's cache for a single episode.
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
