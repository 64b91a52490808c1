"""Engines of judges, of a teacher and of opponents as roles of a run."""

import secrets
import sys
from collections.abc import Sequence
from dataclasses import replace

from actor.seats.engines import KEY_VARIABLE as OPPONENT_KEY
from actor.seats.engines import RUN_VARIABLE
from common.config.run_config import RunConfig
from common.host.machine import Gpu
from common.host.process_settings import ONE_THREAD
from common.repository import CODE
from common.store.run_dir import RunDir
from envhub.envs.dataset.judges.options import KEY_VARIABLE as JUDGE_KEY
from learner.teacher.scores import KEY_VARIABLE as TEACHER_KEY
from tools.checks.served_engines import ServedEngine, merged_overrides
from tools.launch.base import RoleSpec
from tools.launch.roles import LAST_TO_STOP

ENGINE_CONFIG = "quickstart"  # The configuration below the overrides of a served model.
USERS = {JUDGE_KEY: "envhub", TEACHER_KEY: "learner", OPPONENT_KEY: "actor"}


def make_engine_specs(
    cfg: RunConfig, run_dir: RunDir, engines: Sequence[ServedEngine], *, devices: Sequence[Gpu] = ()
) -> list[RoleSpec]:
    """Return the roles that serve models to other roles of the run.

    All engines of one kind share a new key. Without GPUs an engine gets one thread.

    Args:
        devices: the GPUs of this machine.
    """
    keys = {each.key_variable: secrets.token_urlsafe(24) for each in engines}
    program = (sys.executable, str(CODE / "run.py"), "serve", "--config", ENGINE_CONFIG)
    specs: list[RoleSpec] = []
    for engine in engines:
        words = merged_overrides(
            [
                *engine.overrides,
                f"run.dir={cfg.run.dir}",
                f"run.name={cfg.run.name}",
                f"log.level={cfg.log.level}",
                f"policy.role={engine.role}",
                f"policy.api_key_env={engine.key_variable}",
                "policy.port=0",
            ]
        )
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(devices[n].uuid for n in engine.gpus)}
        secret = {engine.key_variable: keys[engine.key_variable]}
        specs.append(
            RoleSpec(
                name=engine.role,
                argv=(*program, *words),
                log_path=run_dir.logs / f"{engine.role}.log",
                env=(visible if engine.gpus else ONE_THREAD) | secret,
                stop_rank=LAST_TO_STOP,
            )
        )
    return specs


def with_engines(
    specs: Sequence[RoleSpec], engines: Sequence[RoleSpec], run_dir: RunDir
) -> list[RoleSpec]:
    """Return the roles of a run with its engines first; the users of an engine get its key.

    Example: the hub gets the key of the judges, the learner that of the teacher, and each actor
    that of the opponents with the folder of their addresses.
    """
    shared = shared_variables(engines, run_dir)
    users = [replace(each, env=each.env | _permitted(each.name, shared)) for each in specs]
    return [*engines, *users]


def shared_variables(engines: Sequence[RoleSpec], run_dir: RunDir) -> dict[str, str]:
    """Return the environment variables by which other roles reach these engines."""
    keys = {name: each.env[name] for each in engines for name in USERS if name in each.env}
    return keys | ({RUN_VARIABLE: str(run_dir.root)} if OPPONENT_KEY in keys else {})


def _permitted(name: str, shared: dict[str, str]) -> dict[str, str]:
    """Return the shared variables that a role may have."""
    role = name.partition("-")[0]
    users = USERS | {RUN_VARIABLE: USERS[OPPONENT_KEY]}
    return {key: value for key, value in shared.items() if users[key] == role}
