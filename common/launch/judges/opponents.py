"""Engines of opponents as roles of a run: model folders in `actor.seats`, and past versions."""

import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from common.checks.fitting import fitting_overrides
from common.checks.gpu_placement import GpuAssignment, used_gpus
from common.checks.machine import Gpu
from common.checks.model_shape import read_shape
from common.checks.preflight import check_model
from common.config.compute import ShardPlace
from common.config.run_config import Launcher, RunConfig
from common.config.seats.engines import KEY_VARIABLE, RUN_VARIABLE, opponent_role, past_role
from common.config.seats.options import PAST
from common.errors import ConfigError
from common.launch.base import RoleSpec
from common.launch.roles import make_engine_spec
from common.store.run_dir import RunDir


def make_opponent_specs(
    cfg: RunConfig,
    run_dir: RunDir,
    *,
    root: Path,
    in_training: bool = True,
    assignment: GpuAssignment | None = None,
    found: Sequence[Gpu] = (),
    engines: Sequence[RoleSpec] = (),
) -> list[RoleSpec]:
    """Return the roles that serve the opponents of a run with engines of their own.

    Args:
        root: the folder of `run.py`.
        in_training: whether the opponents of training play, too.
        assignment: GPUs of learner and actors.
        found: the GPUs of this machine.
        engines: other roles with GPUs of their own.

    Raises: ConfigError: no model at a folder, no free GPU, or the launcher cannot start engines.
    """
    seats = cfg.actor.seats
    every = seats.folders()
    served = {opponent_role(every.index(n)): [n] for n in seats.folders(in_training=in_training)}
    if in_training and PAST in seats.opponents:
        if cfg.learner.num_nodes > 1 and cfg.learner.checkpoint_shards is ShardPlace.OWN_NODE:
            raise ConfigError(
                "learner.checkpoint_shards=own_node: actor.seats.opponents has checkpoints, which"
                " must be whole. Use first_node"
            )
        past = [cfg.model.path, f"policy.past_every_s={seats.past_every_s:g}"]
        served |= {past_role(number): past for number in range(seats.num_past)}
    if served and cfg.launcher is not Launcher.LOCAL:
        raise ConfigError(
            f"actor.seats.opponents={seats.opponents}: engines of opponents need launcher=local."
            " Start one with `python run.py serve`, and use the opponent url with actor.seats.url"
        )
    visible = [each.env.get("CUDA_VISIBLE_DEVICES", "") for each in engines]
    used = used_gpus(assignment, found, visible)
    places = _gpus(cfg, [i for i in range(len(found)) if i not in used], len(found), len(served))
    specs: list[RoleSpec] = []
    for number, (role, (path, *more)) in enumerate(served.items()):
        check_model(path, root, key="actor.seats.opponents")
        overrides = [*_engine_overrides(cfg, (root / path).resolve()), *more, *seats.serve]
        specs.append(
            make_engine_spec(
                cfg,
                run_dir,
                role,
                root=root,
                overrides=overrides,
                key_variable=KEY_VARIABLE,
                gpus=[found[places[number]]] if found else [],
            )
        )
    return specs


def _gpus(cfg: RunConfig, free: Sequence[int], num_gpus: int, num_engines: int) -> Sequence[int]:
    """Return the GPUs of the engines; [] on a machine without GPUs. Raises: ConfigError."""
    given = cfg.actor.seats.gpus
    if not num_gpus:
        return []
    if wrong := [number for number in given if number >= num_gpus]:
        raise ConfigError(f"actor.seats.gpus={given}: this machine has no GPU {wrong[0]}")
    numbers = given or free
    if len(numbers) < num_engines:
        raise ConfigError(
            f"actor.seats.gpus={given}: {num_engines} engines of opponents need a GPU each, but"
            f" {len(numbers)} are named or free. Name one for each; a GPU may be shared with"
            " actor.seats.serve=[actor.gpu_memory_frac=0.3]"
        )
    return numbers


def _engine_overrides(cfg: RunConfig, folder: Path) -> list[str]:
    """Return the settings of an opponent's engine: the model's precision, the run's lengths."""
    fitting = fitting_overrides(read_shape(folder))
    return [
        f"model.path={folder}",
        *(each for each in fitting if not each.startswith("actor.max_")),
        f"actor.max_model_len={cfg.actor.max_model_len}",
        f"actor.max_turn_tokens={cfg.actor.max_turn_tokens}",
    ]


def with_opponents(
    specs: Sequence[RoleSpec], opponents: Sequence[RoleSpec], run_dir: RunDir
) -> list[RoleSpec]:
    """Return the roles of a run with the engines of opponents first.

    The engines share a new key with the actors, which find them by the run directory.
    """
    if not opponents:
        return [*specs]
    shared = {KEY_VARIABLE: secrets.token_urlsafe(24), RUN_VARIABLE: str(run_dir.root)}
    return [
        replace(each, env={**each.env, **shared})
        if each in opponents or each.name.startswith("actor-")
        else each
        for each in (*opponents, *specs)
    ]
