"""The commands about environments: serve them alone, list them, say what they lack."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from common.config.load import load_config
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.launch.preflight import Check
from envhub.catalogue.health import hub_of, servers_of, silent
from envhub.catalogue.listing import format_rows, list_rows
from envhub.catalogue.registry import (
    LOADERS,
    Registry,
    UnknownEnv,
    is_reference,
    missing_requirements,
)
from envhub.env import nearest

SHORT_KEYS = {"port": "envhub.port", "host": "envhub.host", "token": "envhub.token"}


def spell_out(overrides: Sequence[str]) -> list[str]:
    """Returns the overrides with `env= port= host= token=` written as keys of the config."""
    spelt: list[str] = []
    for override in overrides:
        key, equals, value = override.partition("=")
        if equals and key == "env":
            names = [name.strip() for name in value.strip("[]").split(",")]
            override = f"envhub.envs={json.dumps([name for name in names if name])}"
        elif equals and key in SHORT_KEYS:
            override = f"{SHORT_KEYS[key]}={value}"
        spelt.append(override)
    return spelt


def load_alone(overrides: Sequence[str], *, root: Path) -> RunConfig:
    """Returns the config of a hub that belongs to no run; there is no model in it."""
    return load_config(None, ["model.path=unset", *spell_out(overrides)], root=root)


def serve_alone(cfg: RunConfig, *, say: Callable[[str], None]) -> int:
    """Serves the named environments, or all that can run here; returns the exit code.

    Raises:
        ConfigError: one cannot be served, or the address cannot be had.
    """
    names = _with_remote(cfg.envhub.envs or _all_that_run(cfg, say), cfg)
    missing = lacking(names, cfg)
    if missing:  # said before the slow import below
        raise ConfigError("; ".join(missing))
    from envhub.main import serve_alone as serve

    def started(address: str) -> None:
        say(f"environments: {', '.join(names)}")
        say(f"hub: {address} (pages: {address}/docs)")

    try:
        serve(cfg, names, started=started)
    except (UnknownEnv, ValueError) as e:
        raise ConfigError(str(e)) from e
    except OSError as e:
        address = f"{cfg.envhub.host}:{cfg.envhub.port}"
        raise ConfigError(f"envhub.port: cannot bind {address}: {e.strerror or e}") from e
    return 0


def lacking(names: Sequence[str], cfg: RunConfig) -> list[str]:
    """Returns what these environments lack, one line each: programs, files, servers that answer."""
    missing = missing_requirements(names, cfg.envs, cfg.env)
    return missing or silent(servers_of(names, cfg))


def _with_remote(names: Sequence[str], cfg: RunConfig) -> list[str]:
    """Returns the names with that of the AgentGym server, if there is one."""
    return [*dict.fromkeys([*names, *filter(None, [cfg.env.dialect])])]


def _all_that_run(cfg: RunConfig, say: Callable[[str], None]) -> list[str]:
    names: list[str] = []
    for name in LOADERS:
        missing = lacking([name], cfg)
        if missing:
            say(f"left out: {'; '.join(missing)}")
        else:
            names.append(name)
    return names


def list_environments(cfg: RunConfig) -> str:
    """Returns the table of tasks of the named environments, or of all there are."""
    names = cfg.envhub.envs or _with_remote([*LOADERS], cfg)
    try:
        rows = list_rows(names, cfg.envs, cfg.env, is_short=not cfg.envhub.envs)
    except UnknownEnv as e:
        raise ConfigError(str(e)) from e
    return format_rows(rows)


def missing_for(cfg: RunConfig) -> list[str]:
    """Returns what a run's environments lack, one line each; [] if they can all be served.

    Where the run uses a hub elsewhere, only whether that one answers: the rest is its own affair.
    """
    if cfg.envhub.url:
        return silent([hub_of(cfg)])
    tasks = {task.env for task in cfg.tasks}
    references = [name for name in tasks if is_reference(name)]
    if references:
        return [f"env: {references[0]}: put it in envhub.envs=[...] and use the name it has there"]
    names = _with_remote(sorted({*tasks, *cfg.envhub.envs}), cfg)
    missing = lacking(names, cfg)
    if missing:
        return missing
    try:
        registry = Registry(names, cfg.envs, cfg.env)
    except UnknownEnv as e:
        return [f"{_key_of(str(e), cfg)}: {e}"]
    return [
        f"tasks[{i}].subset={task.subset!r}: {task.env} has no subset {task.subset!r}; the nearest"
        f" is {nearest(task.subset, list(registry.spec(task.env).subsets))!r}"
        for i, task in enumerate(cfg.tasks)
        if task.subset not in registry.spec(task.env).subsets
    ]


def _key_of(refusal: str, cfg: RunConfig) -> str:
    """Returns the key that names the environment which is refused."""
    refused = refusal.partition(";")[0]
    keys = [f"tasks[{i}].env={task.env!r}" for i, task in enumerate(cfg.tasks)]
    named = [key for key, task in zip(keys, cfg.tasks, strict=True) if repr(task.env) in refused]
    return next(iter(named), "envhub.envs")


def examine_environments(cfg: RunConfig) -> list[Check]:
    """Returns a line of `doctor` for each environment that there is; none of them is a must."""
    checks: list[Check] = []
    for name in _with_remote([*LOADERS], cfg):
        missing = lacking([name], cfg)
        found = "cannot run here" if missing else "can run here"
        remedy = "; ".join(missing)
        checks.append(Check(what=f"env {name}", found=found, remedy=remedy, is_optional=True))
    return checks
