"""The engine of `algorithm.teacher.path` as a role of a run."""

import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from common.checks.gpu_placement import GpuAssignment
from common.checks.machine import Gpu
from common.checks.model_shape import read_shape
from common.checks.teacher import engine_overrides, teacher_gpus
from common.config.run_config import RunConfig
from common.config.teaching.engine import KEY_VARIABLE, TEACHER
from common.launch.base import RoleSpec
from common.launch.judges.specs import engine_spec, serve_words
from common.launch.roles import ONE_THREAD
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
    env = dict(ONE_THREAD)
    if found:
        used = used_gpus(assignment, found, judges)
        chosen = teacher_gpus(teacher, used, len(found))
        env = {"CUDA_VISIBLE_DEVICES": ",".join(found[i].uuid for i in chosen)}
        width = [f"actor.tensor_parallel_size={len(chosen)}"]
    else:
        width = []
    folder = (root / teacher.path).resolve()
    own = [f"model.path={folder}", *width, *engine_overrides(cfg, read_shape(folder))]
    words = serve_words(cfg, TEACHER, own, key_variable=KEY_VARIABLE)
    return [engine_spec(run_dir, TEACHER, words, root=root, env=env)]


def used_gpus(
    assignment: GpuAssignment | None, found: Sequence[Gpu], judges: Sequence[RoleSpec]
) -> set[int]:
    """Return the numbers of the GPUs that other roles use."""
    used: set[int] = set()
    if assignment is not None:
        used |= {*assignment.learner, *(gpu for own in assignment.actors for gpu in own)}
    names = {
        uuid for each in judges for uuid in each.env.get("CUDA_VISIBLE_DEVICES", "").split(",")
    }
    return used | {number for number, gpu in enumerate(found) if gpu.uuid in names}


def with_teacher_role(specs: Sequence[RoleSpec], teacher: Sequence[RoleSpec]) -> list[RoleSpec]:
    """Return the roles of a run with its teacher first. It shares a new key with the learner."""
    if not teacher:
        return [*specs]
    key = {KEY_VARIABLE: secrets.token_urlsafe(24)}
    users = [each for each in specs if each.name == "learner"]
    return [
        replace(each, env=each.env | key) if each in users or each in teacher else each
        for each in (*teacher, *specs)
    ]
