"""Engines of judges: one for each `reward.NAME.path`."""

from collections.abc import Collection, Mapping
from typing import Any, cast

from common.config.run_config import Launcher, RunConfig
from common.errors import ConfigError
from envhub.envs.dataset.judges.options import KEY_VARIABLE, find_model, role_name
from learner.policy.model_shape import ModelShape, read_shape
from tools.checks.fitting import fitting_overrides
from tools.checks.gpu_placement import engine_gpus
from tools.checks.served.engine import ServedEngine


def own_judges(cfg: RunConfig) -> dict[str, dict[str, Any]]:
    """Return the sections of the judges whose engine the run starts, by name."""
    reward = cfg.envs.dataset.reward
    served = {*(task.env for task in cfg.tasks), *cfg.envhub.envs}
    if "dataset" not in served or not isinstance(reward, dict):
        return {}
    entries = cast("dict[Any, Any]", reward).items()
    sections = {str(n): cast("dict[str, Any]", e) for n, e in entries if isinstance(e, dict)}
    return {name: entry for name, entry in sections.items() if entry.get("path")}


def judge_engines(cfg: RunConfig, *, used: Collection[int], num_gpus: int) -> list[ServedEngine]:
    """Return the engines of the judges of a run, in the order of their names.

    Args:
        used: numbers of the GPUs that other roles use.
        num_gpus: number of this machine's GPUs.

    Raises: ConfigError: the launcher cannot start them, a key is wrong, or no GPU is free.
    """
    judges = own_judges(cfg)
    if judges and cfg.launcher is not Launcher.LOCAL:
        name = next(iter(judges))
        raise ConfigError(
            f"reward.{name}.path={judges[name]['path']}: needs launcher=local. Start the engine"
            f" with `python run.py serve`, and set reward.{name}.url"
        )
    taken = {*used}
    engines: list[ServedEngine] = []
    for name, entry in sorted(judges.items()):
        given: Any = entry.get("gpus")
        given = [] if given is None else given
        given = cast("list[Any]", given) if isinstance(given, list) else [given]
        section = f"reward.{name}"
        chosen = engine_gpus(given, taken, num_gpus, section=section, path=str(entry["path"]))
        taken |= {*chosen}
        folder = find_model(str(entry["path"]))
        engines.append(
            ServedEngine(
                role=role_name(name),
                folder=folder,
                settings=tuple(_settings(name, entry, read_shape(folder))),
                section=section,
                key_variable=KEY_VARIABLE,
                gpus=tuple(chosen),
            )
        )
    return engines


def _settings(name: str, entry: Mapping[str, Any], shape: ModelShape) -> list[str]:
    """Return the settings of an engine, the user's last. Raises: ConfigError."""
    serve: Any = entry.get("serve", [])
    key = f"reward.{name}.serve={serve}"
    if not isinstance(serve, list) or not all(
        isinstance(each, str) and "=" in each for each in cast("list[Any]", serve)
    ):
        raise ConfigError(f"{key}: expects a list such as [actor.max_model_len=4096]")
    return [*fitting_overrides(shape), *cast("list[str]", serve)]
