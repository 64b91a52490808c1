"""Engines of judges as roles of a run: one for each `reward.NAME.path`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from common.checks.fitting import fitting_overrides
from common.checks.gpu_placement import GpuAssignment, engine_gpus, used_gpus
from common.checks.machine import Gpu
from common.checks.model_shape import read_shape
from common.config.run_config import Launcher, RunConfig
from common.errors import ConfigError
from common.launch.base import RoleSpec
from common.launch.roles import make_engine_spec, with_engines
from common.repository import ROOT, working_directory
from common.store.run_dir import RunDir

# Environment variable with the key of all engines of a run. It is in no file.
KEY_VARIABLE = "LONGSTRIDE_JUDGE_KEY"
ROLE_KEYS = ("serve", "gpus")  # Keys of `reward.NAME` that only the launcher reads.


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
    used = used_gpus(assignment, found)
    specs: list[RoleSpec] = []
    for name, entry in sorted(judges.items()):
        given: Any = entry.get("gpus")
        given = [] if given is None else given
        given = cast("list[Any]", given) if isinstance(given, list) else [given]
        where = {"section": f"reward.{name}", "path": str(entry["path"])}
        chosen = engine_gpus(given, used, len(found), **where) if found else []
        used |= {*chosen}
        specs.append(
            make_engine_spec(
                cfg,
                run_dir,
                role_name(name),
                root=root,
                overrides=_settings(name, entry),
                key_variable=KEY_VARIABLE,
                gpus=[found[number] for number in chosen],
            )
        )
    return specs


def with_judges(specs: Sequence[RoleSpec], judges: Sequence[RoleSpec]) -> list[RoleSpec]:
    """Return the roles of a run with those of its judges first. They share a new key with the hub.

    Example: the hub and judge-style get LONGSTRIDE_JUDGE_KEY in their environment, the actors none.
    """
    return with_engines(specs, judges, variable=KEY_VARIABLE, users=("envhub",))


def _settings(name: str, entry: Mapping[str, Any]) -> list[str]:
    """Return the model and the settings of an engine. Raises: ConfigError."""
    serve: Any = entry.get("serve", [])
    key = f"reward.{name}.serve={serve}"
    if not isinstance(serve, list) or not all(
        isinstance(each, str) and "=" in each for each in cast("list[Any]", serve)
    ):
        raise ConfigError(f"{key}: expects a list such as [actor.max_model_len=4096]")
    folder = find_model(str(entry["path"]))
    return [
        f"model.path={folder}",
        *fitting_overrides(read_shape(folder)),
        *cast("list[str]", serve),
    ]
