"""Assignment of this machine's GPUs to the roles of a run, before any role starts."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from common.config.actor import GpuPlacement
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.host.machine import Gpu
from common.text import counted


@dataclass(frozen=True, slots=True)
class GpuAssignment:
    """Indices of visible GPUs by role."""

    learner: tuple[int, ...]  # GPU of each rank; () trains on the CPU.
    actors: tuple[tuple[int, ...], ...]  # GPUs of each engine's tensor-parallel workers.
    engines_per_process: int = 1

    @property
    def processes(self) -> tuple[tuple[int, ...], ...]:
        """GPUs of each actor process, each GPU once, in the order of its engines."""
        several = self.engines_per_process
        starts = range(0, len(self.actors), several)
        parts = (self.actors[start : start + several] for start in starts)
        return tuple(
            tuple(dict.fromkeys(gpu for engine in part for gpu in engine)) for part in parts
        )


def trains_on_gpu(cfg: RunConfig, *, num_gpus: int) -> bool:
    """Return whether the learner's device is a GPU on a machine with `num_gpus` GPUs."""
    return cfg.learner.device.startswith("cuda") or (cfg.learner.device == "auto" and num_gpus > 0)


def assign_gpus(cfg: RunConfig, *, num_gpus: int) -> GpuAssignment:
    """Return the GPUs of learner and engines: separate if there are enough, else colocated.

    Example (4 GPUs, 2 ranks, 3 actors): the learner uses GPUs 0 and 1. With
    `actor.placement=apart` the run is refused, because one GPU is missing. With auto, the actors
    use GPUs 2, 3 and, shared with rank 0, 0.

    Raises: ConfigError: there are too few GPUs; the message has the calculation and the remedy.
    """
    num_ranks = cfg.learner.local_ranks
    width = cfg.actor.tensor_parallel_size
    num_engines = cfg.actor.num_engines
    wanted = num_engines * width
    learner: tuple[int, ...] = ()
    if trains_on_gpu(cfg, num_gpus=num_gpus):
        first = int(cfg.learner.device.partition(":")[2] or 0)
        learner = tuple(range(first, first + num_ranks))
        if learner[-1] >= num_gpus:
            raise ConfigError(
                f"learner.num_ranks={cfg.learner.num_ranks} with"
                f" learner.device={cfg.learner.device}: each rank needs its own GPU, up"
                f" to number {learner[-1]}, and this machine has {num_gpus}"
            )
    if wanted and width > num_gpus:
        raise ConfigError(
            f"actor.tensor_parallel_size={width}: one engine needs this number of GPUs, and this"
            f" machine has {num_gpus}"
        )
    free = [i for i in range(num_gpus) if i not in learner]
    if wanted <= len(free):
        order = free
    elif cfg.actor.placement is GpuPlacement.APART:
        raise ConfigError(
            f"actor.placement=apart: {_engines_text(cfg)} x"
            f" actor.tensor_parallel_size={width} = {counted(wanted, 'GPU')} in addition to the"
            f" learner's {len(learner)}, and this machine has {num_gpus}. Use"
            " actor.placement=colocated to share GPUs"
        )
    else:
        order = [*free, *learner]
    if cfg.actor.placement is GpuPlacement.COLOCATED:
        order = [*learner, *free]
    actors = [
        tuple(order[(i * width + k) % len(order)] for k in range(width)) for i in range(num_engines)
    ]
    return GpuAssignment(learner, tuple(actors), cfg.actor.engines_per_process)


def _engines_text(cfg: RunConfig) -> str:
    """Return the calculation of the number of engines as text."""
    several = cfg.actor.engines_per_process
    per_process = f" x actor.engines_per_process={several}" if several > 1 else ""
    return f"actor.num_actors={cfg.actor.num_processes}{per_process}"


def used_gpus(assignment: GpuAssignment | None) -> set[int]:
    """Return the numbers of the GPUs that learner and actors use."""
    if assignment is None:
        return set()
    return {*assignment.learner}.union(*assignment.actors)


def engine_gpus(
    requested: Sequence[object], used: Collection[int], num_gpus: int, *, section: str, path: str
) -> list[int]:
    """Return the GPUs of a further engine: the requested ones, or the first that no role uses.

    Without GPUs the list is empty.

    Args:
        requested: value of the key `gpus` of the engine's section; [] if it is not set.
        section: section of the engine's keys, for errors.
        path: value of its key `path`.

    Raises: ConfigError: a number is wrong, or all GPUs are in use.
    """
    if not num_gpus:
        return []
    numbers = [entry for entry in requested if type(entry) is int and 0 <= entry < num_gpus]
    if len(numbers) < len(requested):
        shown = f"{section}.gpus={[*requested]}"
        raise ConfigError(f"{shown}: expects numbers of GPUs from 0 to {num_gpus - 1}")
    free = [i for i in range(num_gpus) if i not in used]
    if not numbers and not free:
        raise ConfigError(
            f"{section}.path={path}: the roles of the run use all {counted(num_gpus, 'GPU')} of"
            f" this machine. Lower actor.num_actors, or share a GPU with {section}.gpus=[0] and"
            f" {section}.serve=[actor.gpu_memory_frac=0.3]"
        )
    return numbers or free[:1]


def check_slices(cfg: RunConfig, gpus: Sequence[Gpu]) -> None:
    """Check that each role's process needs at most one slice.

    CUDA shows only one slice to a process, for any CUDA_VISIBLE_DEVICES.

    Raises: ConfigError: a process needs more.
    """
    if not any(gpu.is_slice for gpu in gpus):
        return
    names = ", ".join(dict.fromkeys(gpu.name for gpu in gpus))
    keys = {
        "learner.num_ranks": cfg.learner.local_ranks,
        "actor.tensor_parallel_size": cfg.actor.tensor_parallel_size,
        "learner.device": int(cfg.learner.device.partition(":")[2] or 0) + 1,
    }
    for key, num in keys.items():
        if num > 1:
            value = cfg.learner.device if key == "learner.device" else num
            raise ConfigError(
                f"{key}={value}: the GPUs of this machine are MIG slices ({names}), and CUDA shows"
                " only one slice to a process. Use"
                f" {'learner.device=cuda' if key == 'learner.device' else f'{key}=1'}"
            )


def visible_to(
    role: str, number: int, assignment: GpuAssignment, gpus: Sequence[Gpu]
) -> dict[str, str]:
    """Return the environment variables that restrict a role's process to its own GPUs.

    Args:
        role: "learner", "actor", or a role without GPUs.
        number: the number of the actor's process.
        gpus: this machine's GPUs; {} is returned without any.
    """
    if not gpus:
        return {}
    numbers: tuple[int, ...] = ()
    if role == "learner" and assignment.learner:
        # The lower GPUs stay visible, so that `cuda:1` remains valid.
        numbers = tuple(range(assignment.learner[-1] + 1))
    elif role == "actor":
        numbers = assignment.processes[number]
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[i].uuid for i in numbers)}
