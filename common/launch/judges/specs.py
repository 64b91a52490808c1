"""Engines of judges as roles of a run: one for each `reward.NAME.path`."""

import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from common.checks.fitting import fitting_overrides, merged_overrides
from common.checks.gpu_placement import GpuAssignment
from common.checks.machine import Gpu
from common.checks.model_shape import read_shape
from common.config.run_config import Launcher, RunConfig
from common.errors import ConfigError
from common.launch.base import RoleSpec
from common.launch.roles import ONE_THREAD
from common.repository import ROOT, working_directory
from common.store.run_dir import RunDir

# Environment variable with the key of all engines of a run. It is in no file.
KEY_VARIABLE = "LONGSTRIDE_JUDGE_KEY"
ROLE_KEYS = ("serve", "gpus")  # Keys of `reward.NAME` that only the launcher reads.
MODEL_CONTEXT = "quickstart"  # The configuration below the overrides of an engine.
STOP_WITH_HUB = 2


def role_name(judge: str) -> str:
    """Return the name of the role that serves a judge."""
    return f"judge-{judge}"


def find_model(path: str) -> Path:
    """Return a model folder, below the command's directory or else the repository."""
    here = working_directory() / Path(path).expanduser()
    return here if here.exists() else ROOT / path


def own_judges(cfg: RunConfig) -> dict[str, dict[str, Any]]:
    """Return the sections of the judges whose engine the run starts, by name."""
    reward = cfg.envs.dataset.reward
    served = {*(task.env for task in cfg.tasks), *cfg.envhub.envs}
    if "dataset" not in served or not isinstance(reward, dict):
        return {}
    entries = cast("dict[Any, Any]", reward).items()
    sections = {str(n): cast("dict[str, Any]", e) for n, e in entries if isinstance(e, dict)}
    return {name: entry for name, entry in sections.items() if entry.get("path")}


def make_judge_specs(
    cfg: RunConfig,
    run_dir: RunDir,
    *,
    root: Path,
    assignment: GpuAssignment | None = None,
    found: Sequence[Gpu] = (),
) -> list[RoleSpec]:
    """Return the roles that serve the judges of a run, in the order of their names.

    Args:
        root: the folder of `run.py`.
        assignment: GPUs of the other roles.
        found: the GPUs of this machine.

    Raises: ConfigError: the launcher cannot start them, a key is wrong, or no GPU is free.
    """
    judges = own_judges(cfg)
    if judges and cfg.launcher is not Launcher.LOCAL:
        name = next(iter(judges))
        raise ConfigError(
            f"reward.{name}.path={judges[name]['path']}: needs launcher=local. Start the engine"
            f" with `python run.py serve`, and set reward.{name}.url"
        )
    used = (
        {*assignment.learner, *(gpu for own in assignment.actors for gpu in own)}
        if assignment
        else set[int]()
    )
    specs: list[RoleSpec] = []
    for name, entry in sorted(judges.items()):
        env = dict(ONE_THREAD)
        if found:
            gpus = _gpus(name, entry, used, len(found))
            used |= {*gpus}
            env = {"CUDA_VISIBLE_DEVICES": ",".join(found[i].uuid for i in gpus)}
        words = _words(cfg, name, entry)
        specs.append(engine_spec(run_dir, role_name(name), words, root=root, env=env))
    return specs


def engine_spec(
    run_dir: RunDir, role: str, words: Sequence[str], *, root: Path, env: Mapping[str, str]
) -> RoleSpec:
    """Return a role that serves an engine. `words` is its command line after `run.py`."""
    return RoleSpec(
        name=role,
        argv=(sys.executable, str(root / "run.py"), *words),
        log_path=run_dir.logs / f"{role}.log",
        env=dict(env),
        stop_rank=STOP_WITH_HUB,
    )


def with_judges(specs: Sequence[RoleSpec], judges: Sequence[RoleSpec]) -> list[RoleSpec]:
    """Return the roles of a run with those of its judges first. They share a new key with the hub.

    Example: the hub and judge-style get LONGSTRIDE_JUDGE_KEY in their environment, the actors none.
    """
    if not judges:
        return [*specs]
    key = {KEY_VARIABLE: secrets.token_urlsafe(24)}
    users = [each for each in specs if each.name == "envhub"]
    return [
        replace(each, env=each.env | key) if each in users or each in judges else each
        for each in (*judges, *specs)
    ]


def _words(cfg: RunConfig, name: str, entry: Mapping[str, Any]) -> list[str]:
    """Return the command line of an engine after `run.py`. Raises: ConfigError."""
    serve: Any = entry.get("serve", [])
    key = f"reward.{name}.serve={serve}"
    if not isinstance(serve, list) or not all(
        isinstance(each, str) and "=" in each for each in cast("list[Any]", serve)
    ):
        raise ConfigError(f"{key}: expects a list such as [actor.max_model_len=4096]")
    folder = find_model(str(entry["path"]))
    fitting = fitting_overrides(read_shape(folder))
    own = [f"model.path={folder}", *fitting, *cast("list[str]", serve)]
    return serve_words(cfg, role_name(name), own, key_variable=KEY_VARIABLE)


def serve_words(
    cfg: RunConfig, role: str, overrides: Sequence[str], *, key_variable: str
) -> list[str]:
    """Return the command line after `run.py` of an engine that is a role of a run."""
    own = [
        *overrides,
        f"run.dir={cfg.run.dir}",
        f"run.name={cfg.run.name}",
        f"log.level={cfg.log.level}",
        f"policy.role={role}",
        f"policy.api_key_env={key_variable}",
        "policy.port=0",
    ]
    return ["serve", "--config", MODEL_CONTEXT, *merged_overrides(own)]


def _gpus(name: str, entry: Mapping[str, Any], used: set[int], num_gpus: int) -> list[int]:
    """Return the GPUs of an engine: the given ones, or the first that no role uses.

    Raises: ConfigError: a number is wrong, or all GPUs are in use.
    """
    given: Any = entry.get("gpus")
    if given is None:
        free = [i for i in range(num_gpus) if i not in used]
        if free:
            return free[:1]
        raise ConfigError(
            f"reward.{name}.path={entry['path']}: the roles of the run use all {num_gpus} GPUs of"
            f" this machine. Lower actor.num_actors, or share a GPU with reward.{name}.gpus=[0] and"
            f" reward.{name}.serve=[actor.gpu_memory_frac=0.3]"
        )
    numbers = cast("list[Any]", given) if isinstance(given, list) else [given]
    for each in numbers:
        if type(each) is not int or not 0 <= each < num_gpus:
            where = f"reward.{name}.gpus={given}"
            raise ConfigError(f"{where}: expects numbers of GPUs from 0 to {num_gpus - 1}")
    return numbers
