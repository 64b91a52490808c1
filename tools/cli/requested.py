"""The configuration for a request: a named config, or the stored config of a run."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.config.keys import commands_of, declared, dotted
from common.config.knobs import FILE_NAME, PATH
from common.config.load import (
    config_as_yaml,
    find_config,
    load_config,
    override_value,
    without_secrets,
)
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.host.loopback import IPV4, IPV6, can_bind, loopback
from common.log import configure_logging
from common.repository import ROOT
from common.store.run_dir import RunDir
from common.text import known_hint
from tools.cli.command_line import ParsedCommand, all_commands

logger = logging.getLogger(__name__)

DEFAULT_CONFIG = "quickstart"


def belongs_to_no_run(request: ParsedCommand) -> bool:
    """Return whether the request names neither a config nor a run."""
    keys = ("run.name", "run.dir")
    named = [key for key in keys if override_value(request.overrides, key) is not None]
    return request.config is None and not named


def load_named(request: ParsedCommand, *, defaults: Sequence[str] = ()) -> Any:
    """Return the config of a request: overrides come after `defaults`; a named run uses its own.

    Its class is the `schema` of the command.
    """
    schema = all_commands()[request.command].schema
    overrides = [*defaults, *request.overrides]
    check_keys_of_others(request.overrides, schema)
    if request.config is None and (name := override_value(overrides, "run.name")) is not None:
        config_path = own_config(overrides, name)
        if config_path.is_file():
            return load_config(str(config_path), overrides, schema=schema)
    named = request.config or DEFAULT_CONFIG
    return load_config(named, overrides, is_dry=request.is_dry, schema=schema)


def check_keys_of_others(overrides: Sequence[str], schema: type[RunConfig]) -> None:
    """Check that a key which only another command reads exists there. Raises: ConfigError."""
    for override in overrides:
        key = override.partition("=")[0]
        if readers := commands_of(dotted(key), schema):
            declared(key, shown=override, schema=all_commands()[readers.split()[0]].schema)


def load_joined(request: ParsedCommand) -> RunConfig:
    """Return the config of the run that a role joins, or that a command reads.

    Without `run.name` it is the run that `--config` names, or the latest one.

    Raises:
        ConfigError: there is no such run; the message names the nearest one. Only a scheduler
            with `--config` begins a run.
    """
    overrides = request.overrides
    check_keys_of_others(overrides, RunConfig)
    name = override_value(overrides, "run.name")
    if name is None and request.config is not None:
        name = find_config(request.config).stem
    if name is None:
        latest = _folder(overrides) / "latest"
        name = latest.resolve().name if latest.exists() else DEFAULT_CONFIG
    config_path = own_config(overrides, name)
    if config_path.is_file():
        return load_config(str(config_path), overrides)
    if request.command == "scheduler" and request.config is not None:
        return load_config(request.config, overrides)
    # A wrong key is reported before a missing run.
    load_config(request.config or DEFAULT_CONFIG, overrides)
    raise ConfigError(
        f"run.name={name}: no such run in {config_path.parents[1]}/{_nearest_run(config_path)}"
    )


def _folder(overrides: Sequence[str]) -> Path:
    """Return the folder of the runs: `run.dir`, or the default."""
    folder = override_value(overrides, "run.dir")
    if folder is not None and not PATH.fits(folder):
        raise ConfigError(f"run.dir={folder!r:.100}: must be {PATH.phrase}")
    return ROOT / (folder or "runs")


def own_config(overrides: Sequence[str], name: str) -> Path:
    """Return the path of a run's configuration. Raises: ConfigError: not a valid run name."""
    if not FILE_NAME.fits(name):  # The name becomes part of a path.
        raise ConfigError(f"run.name={name!r:.100}: must be {FILE_NAME.phrase}")
    return _folder(overrides) / name / "config.yaml"


def _nearest_run(config_path: Path) -> str:
    """Return a hint for an unknown run: the most similar name, or how to start a run."""
    names = sorted(
        {path.parent.name for path in config_path.parents[1].glob("*/config.yaml")} - {"latest"}
    )
    if not names:
        return ", which has no run; start one with `train`"
    return known_hint(config_path.parent.name, names, form=str)


def load_with_model(request: ParsedCommand) -> Any:
    """Return the config of a request, with folders of plain weights for all its models."""
    from tools.checks.hub_models import resolve_models
    from tools.dequantise.models import plain_models

    cfg = load_named(request)
    cfg = resolve_models(cfg, is_dry=request.is_dry, may_stand_in=request.is_dry)
    is_served = request.command == "serve"
    return on_loopback(plain_models(cfg, is_dry=request.is_dry, is_served=is_served))


def on_loopback(cfg: Any) -> Any:
    """Return a config whose roles listen on the loopback address that this machine supports.

    It replaces 127.0.0.1 by ::1 on a machine without IPv4, and the reverse without IPv6.
    """
    sections = {
        name: replace(section, host=loopback())
        for name in ("scheduler", "learner", "envhub")
        if (host := (section := getattr(cfg, name)).host) in (IPV4, IPV6) and not can_bind(host)
    }
    return replace(cfg, **sections) if sections else cfg


def directory_of(cfg: RunConfig) -> RunDir:
    """Return the directory of a run."""
    return RunDir(root=ROOT / cfg.run.dir / cfg.run.name)


def begin(cfg: Any, command: str, *, keeps_date: bool) -> tuple[Any, RunDir]:
    """Configure the log of a command, and fix one date for all its prompts.

    Args:
        keeps_date: whether the run directory stores the date, see `dated`.

    Returns: The configuration with the date, and the run directory.
    """
    from common.formats.chat_template import fix_prompts
    from common.store.run_start import dated

    run_dir = directory_of(cfg)
    configure_logging(command, cfg.log.level)
    log_weights(cfg)
    cfg = dated(cfg, run_dir, is_kept=keeps_date)
    fix_prompts(cfg.model)
    return cfg, run_dir


def log_weights(cfg: RunConfig) -> None:
    """Log each model whose weights were quantised."""
    from tools.dequantise.models import weight_lines

    for line in weight_lines(cfg):
        logger.info("%s", line)


def show_config(cfg: RunConfig, command: str, *, has_plan: bool = False) -> int:
    """Print the resolved configuration, memory plan, precision and objective; return exit code."""
    from learner.objective.description import summary_lines
    from tools.checks.hub_models import download_lines
    from tools.checks.role_starts import function_lines
    from tools.dequantise.models import disk_lines, weight_lines, with_cache_paths
    from tools.offline.checks import rate_lines

    lines = _memory_lines(cfg) if has_plan else []
    lines += [*weight_lines(cfg), *disk_lines(cfg), *download_lines(cfg)]
    lines += rate_lines(command, cfg)
    if command not in ("sft", "dpo", "evolve"):  # They have objectives of their own.
        lines += summary_lines(cfg.algorithm, cfg.learner)
        lines += function_lines(cfg)
        lines += cfg.curriculum.warnings(cfg.horizon)
    text = config_as_yaml(without_secrets(cfg)) + "".join(f"# {line}\n" for line in lines)
    print(with_cache_paths(text, cfg), end="")
    return 0


def _memory_lines(cfg: RunConfig) -> list[str]:
    """Return the memory plan of a run, its placement on a Ray cluster, and a conversation."""
    from tools.checks import memory_plan, preflight
    from tools.checks.preview import preview_lines

    lines = memory_plan.lines_here(preflight.on_this_machine(cfg))
    if cfg.launcher == "ray":
        from tools.launch.ray.cluster import placement_lines

        lines += placement_lines(cfg)
    return [*lines, *preview_lines(cfg)]
