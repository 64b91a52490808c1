"""The engine of `algorithm.teacher.path` as a role of a run."""

from collections.abc import Sequence
from pathlib import Path

from common.checks.gpu_placement import GpuAssignment, used_gpus
from common.checks.machine import Gpu
from common.checks.model_shape import read_shape
from common.checks.teacher import engine_overrides, teacher_gpus
from common.config.run_config import RunConfig
from common.config.teaching.engine import KEY_VARIABLE, TEACHER
from common.launch.base import RoleSpec
from common.launch.roles import make_engine_spec, with_engines
from common.store.run_dir import RunDir


def make_teacher_specs(
    cfg: RunConfig,
    run_dir: RunDir,
    *,
    root: Path,
    assignment: GpuAssignment | None = None,
    found: Sequence[Gpu] = (),
    judges: Sequence[RoleSpec] = (),
) -> list[RoleSpec]:
    """Return the role that serves the teacher; an empty list if the run starts none.

    Args:
        root: the folder of `run.py`.
        assignment: GPUs of learner and actors.
        found: the GPUs of this machine.
        judges: roles with GPUs of their own.

    Raises: ConfigError: a number of a GPU is wrong, or no GPU is free.
    """
    teacher = cfg.algorithm.teacher
    if not teacher.path:
        return []
    chosen: list[int] = []
    if found:
        visible = [each.env.get("CUDA_VISIBLE_DEVICES", "") for each in judges]
        chosen = teacher_gpus(teacher, used_gpus(assignment, found, visible), len(found))
    folder = (root / teacher.path).resolve()
    return [
        make_engine_spec(
            cfg,
            run_dir,
            TEACHER,
            root=root,
            overrides=[
                f"model.path={folder}",
                *([f"actor.tensor_parallel_size={len(chosen)}"] if chosen else []),
                *engine_overrides(cfg, read_shape(folder)),
            ],
            key_variable=KEY_VARIABLE,
            gpus=[found[number] for number in chosen],
        )
    ]


def with_teacher_role(specs: Sequence[RoleSpec], teacher: Sequence[RoleSpec]) -> list[RoleSpec]:
    """Return the roles of a run with its teacher first. It shares a new key with the learner."""
    return with_engines(specs, teacher, variable=KEY_VARIABLE, users=("learner",))
