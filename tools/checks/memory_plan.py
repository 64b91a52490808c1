"""The memory that a run will use, per GPU and host, before any weights are loaded."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from common.config.learner import Moments, Offload, OptimizerKind
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.host.machine import GIB, Gpu, gpus, memory_bytes
from common.repository import ROOT
from common.text import counted
from learner.policy.model_shape import ModelShape, read_shape
from learner.policy.precision_choice import choose_precision
from tools.checks.gpu_placement import GpuAssignment, assign_gpus, trains_on_gpu
from tools.checks.memory_parts import (
    SAMPLING,
    TRAINING,
    Part,
    cpu_engines_parts,
    engine_host_parts,
    gpu_engine_parts,
    in_phases,
    kv_bytes_per_token,
    learner_host_parts,
    learner_parts,
    shown,
    times,
    uncounted,
)
from tools.checks.served_engines import ServedEngine, served_engines

PROCESS_BYTES = 1 * GIB  # torch and vLLM themselves; measured: 0.7-1.1 GiB per process.
GPU_REMEDY = (
    "use more GPUs for the learner (learner.num_gpus), train adapters (learner.lora.rank=16), set"
    " learner.gradient_checkpointing=true or learner.moments=8bit, lower actor.gpu_memory_frac or"
    " learner.max_tokens_per_microbatch, divide rows over several GPUs (learner.sequence_ranks),"
    " or use GPUs with more memory"
)
HOST_REMEDY = (
    "lower learner.max_tokens_per_microbatch, actor.kv_cache_gib, actor.num_actors or"
    " learner.num_ranks, or set learner.gradient_checkpointing=true"
)


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
    is_cuda = trains_on_gpu(cfg, num_gpus=len(on))
    first, other = (learner_parts(cfg, shape, is_cuda=is_cuda, rank=rank) for rank in (0, 1))
    of_learner = learner_host_parts(cfg, shape, is_cuda=is_cuda)
    if not is_cuda:
        of_learner = [*first, *times(other, cfg.learner.local_ranks - 1, "ranks"), *of_learner]
    if not (on or is_cuda):
        host = of_learner
        host += cpu_engines_parts(cfg, shape)
        host.append(_programs(cfg, cfg.learner.local_ranks, cfg.actor.num_engines))
        return [MemoryBudget("host", host, host_bytes, HOST_REMEDY)]
    num_gpus = len(on) or max(cfg.learner.local_ranks, cfg.actor.tensor_parallel_size)
    assignment = assign_gpus(cfg, num_gpus=num_gpus)
    per_node = num_gpus // num_nodes
    _check_nodes(cfg, assignment, per_node)
    places: list[MemoryBudget] = []
    for i in sorted({*assignment.learner, *(gpu for own in assignment.actors for gpu in own)}):
        capacity = on[i].memory_bytes if i < len(on) else 0
        parts: list[Part] = []
        if i in assignment.learner:
            parts += other if assignment.learner.index(i) else first
        if num_engines := sum(i in own for own in assignment.actors):
            parts += gpu_engine_parts(cfg, shape, capacity, num_engines=num_engines)
            if cfg.actor.sleep and i in assignment.learner:
                parts = in_phases(parts, num_engines=num_engines)
        name = f"gpu {i % per_node}" + (f" ({on[i].name})" if i < len(on) and on[i].name else "")
        name = f"node {i // per_node}, {name}" if num_nodes > 1 else name
        remedy = GPU_REMEDY
        if i in assignment.learner:
            rank = assignment.learner.index(i)
            remedy += _offload_remedy(cfg, shape, parts, rank, capacity, host_bytes)
        places.append(MemoryBudget(name, parts, capacity, remedy))
    for node in range(num_nodes):
        is_first = node == 0
        host = list(of_learner) if is_first else []
        num_engines = sum(own[0] // per_node == node for own in assignment.actors)
        host.append(_programs(cfg, cfg.learner.local_ranks if is_first else 0, num_engines))
        host += times(engine_host_parts(cfg, shape), num_engines, "engines")
        name = f"node {node}, host" if num_nodes > 1 else "host"
        places.append(MemoryBudget(name, host, host_bytes, HOST_REMEDY))
    return places


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
    for own in assignment.actors:
        if len({gpu // per_node for gpu in own}) > 1:
            raise ConfigError(
                f"actor.tensor_parallel_size={cfg.actor.tensor_parallel_size}: an engine would use"
                f" GPUs of two nodes, which have {per_node} each. Use a divisor of the number of"
                " GPUs that the learner leaves free"
            )
    for own in assignment.processes:
        if len({gpu // per_node for gpu in own}) > 1:
            raise ConfigError(
                f"actor.engines_per_process={cfg.actor.engines_per_process}: the engines of an"
                f" actor process would use GPUs of two nodes, which have {per_node} each. Use a"
                " divisor of the number of GPUs that the learner leaves free"
            )


def _programs(cfg: RunConfig, num_ranks: int, num_engines: int) -> Part:
    """Return the memory of all processes beside weights and caches."""
    # A single worker runs in the engine's own process. Several workers have one process each.
    width = cfg.actor.tensor_parallel_size
    num_actors = -(-num_engines // cfg.actor.engines_per_process)
    num = num_ranks + num_actors + (1 if width == 1 else 1 + width) * num_engines
    how = f"{num} processes of learner, actors and engines x {shown(PROCESS_BYTES)}"
    return Part("programs", num * PROCESS_BYTES, how)


def is_elsewhere(cfg: RunConfig) -> bool:
    """Return whether to plan for the config's machine, because this one has no GPU."""
    return cfg.machine.num_gpus > 0 and cfg.learner.device != "cpu" and not gpus()


def plan_here(cfg: RunConfig) -> list[MemoryBudget]:
    """Return the plan for this machine, or for the config's machine (see `is_elsewhere`).

    Raises: ConfigError: there are too few GPUs.
    """
    shape = read_shape(ROOT / cfg.model.path)
    found = gpus()
    num_gpus = len(_named_gpus(cfg) if is_elsewhere(cfg) else found)
    is_cuda = trains_on_gpu(cfg, num_gpus=num_gpus)
    precision, _ = choose_precision(cfg.learner, ROOT / cfg.model.path, is_cuda=is_cuda)
    cfg = replace(cfg, learner=replace(cfg.learner, precision=precision))
    if is_elsewhere(cfg):
        return _with_served(cfg, plan_named(cfg, shape), _named_gpus(cfg))
    try:
        places = make_plan(cfg, shape, on=found, host_bytes=memory_bytes()[0])
    except ConfigError as error:
        if not cfg.machine.num_gpus:
            raise
        needed = sum(each.total_bytes for each in plan_named(cfg, shape) if "gpu" in each.name)
        has = sum(gpu.memory_bytes for gpu in found)
        raise ConfigError(
            f"{error}. This configuration is made for {cfg.machine.text} and needs about"
            f" {shown(needed)} of GPU memory; the GPUs of this machine have {shown(has)}. Change"
            " learner.num_gpus and actor.num_gpus"
        ) from error
    return _with_served(cfg, places, found)


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


def _with_served(
    cfg: RunConfig, places: Sequence[MemoryBudget], on: Sequence[Gpu]
) -> list[MemoryBudget]:
    """Return the plan with the engines of judges, teacher and opponents on the first node.

    Raises: ConfigError: no GPU is free for one.
    """
    assignment = assign_gpus(cfg, num_gpus=len(on)) if on else None
    num_gpus = len(on) // cfg.machine.num_nodes if is_elsewhere(cfg) else len(on)
    found = list(places)
    for engine in served_engines(cfg, assignment=assignment, num_gpus=num_gpus):
        if not engine.gpus:
            *others, host = found
            found = [*others, replace(host, parts=[*host.parts, *engine.parts(None)])]
        for number in engine.gpus:
            found = _with_engine(found, engine, number, on[number])
    return found


def _with_engine(
    places: Sequence[MemoryBudget], engine: ServedEngine, number: int, gpu: Gpu
) -> list[MemoryBudget]:
    """Return the plan with an engine on one GPU of the first node."""
    parts = engine.parts(gpu)
    found = list(places)
    for at, place in enumerate(found):
        if place.name.partition(" (")[0].rpartition(", ")[2] == f"gpu {number}":
            found[at] = replace(place, parts=[*place.parts, *parts])
            return found
    label = f"gpu {number}" + (f" ({gpu.name})" if gpu.name else "")
    remedy = f"choose a smaller model, or lower actor.gpu_memory_frac in {engine.section}.serve"
    found.insert(len(found) - 1, MemoryBudget(label, parts, gpu.memory_bytes, remedy))
    return found


def plan_lines(places: Sequence[MemoryBudget]) -> list[str]:
    """Return the plan as a table. Equal neighbours are merged into one entry."""
    lines: list[str] = []
    for alike in _equal_places(places):
        place = alike[0]
        more = len(alike) - 1
        of = f" of {shown(place.capacity_bytes)}" if place.capacity_bytes else ""
        name = place.name + (
            f" and {counted(more, 'equal one')}, up to {alike[-1].name}" if more else ""
        )
        lines.append(f"memory, {name}: about {shown(place.total_bytes)}{of}")
        lines += [
            f"  {shown(p.num_bytes):>9}  {p.label:<27}  {_calculation(p)}" for p in place.parts
        ]
    return lines


def _calculation(part: Part) -> str:
    return f"{part.how}; only while {part.phase}" if part.phase else part.how


def _equal_places(places: Sequence[MemoryBudget]) -> Iterator[list[MemoryBudget]]:
    """Yield places with equal plans together."""
    for _, alike in groupby(places, key=lambda p: (p.parts, p.capacity_bytes, p.remedy)):
        yield list(alike)


def lines_here(cfg: RunConfig) -> list[str]:
    """Return the plan for this machine, or for the config's machine, as a table."""
    places = plan_lines(plan_here(cfg))
    if is_elsewhere(cfg):
        places.insert(0, f"This machine has no GPU. Plan for the target, {cfg.machine.text}:")
    if names := uncounted(cfg):
        places.append(f"memory, not counted: {', '.join(names)}")
    return places


def check_memory(cfg: RunConfig, places: Sequence[MemoryBudget], shape: ModelShape) -> None:
    """Check that the plan fits in this machine's memory; unknown sizes are skipped.

    Raises: ConfigError: a memory is too small, or the engine's cache cannot hold one episode.
    """
    for place in places:
        if place.capacity_bytes and place.total_bytes > place.capacity_bytes:
            largest = sorted(place.parts, key=lambda p: (p.is_peak, -p.num_bytes))[:3]
            most = "; ".join(f"{p.label} {shown(p.num_bytes)} = {p.how}" for p in largest)
            raise ConfigError(
                f"memory: the run needs about {shown(place.total_bytes)} on {place.name}, which"
                f" has {shown(place.capacity_bytes)} ({most}). Remedies: {place.remedy}"
            )
        _check_cache(cfg, place, shape)


def _check_cache(cfg: RunConfig, place: MemoryBudget, shape: ModelShape) -> None:
    """Refuse a cache that is too small for one longest episode; vLLM would refuse it later."""
    each = kv_bytes_per_token(cfg, shape) // cfg.actor.tensor_parallel_size
    needed = each * cfg.actor.max_model_len
    for part in place.parts:
        found = part.num_bytes // part.times
        if part.label == "KV cache" and found < needed:
            raise ConfigError(
                f"actor.max_model_len={cfg.actor.max_model_len}: an episode of this length needs"
                f" {shown(needed)} of KV cache ({each:,} B per token), and the engine on"
                f" {place.name} has {shown(found)}. Lower actor.max_model_len, or raise"
                f" {'actor.gpu_memory_frac' if 'gpu' in place.name else 'actor.kv_cache_gib'}"
            )
