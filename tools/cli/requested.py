"""The configuration for a request: a named config, or the stored config of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actor.policy import PolicyConfig
from common.config.knobs import FILE_NAME, PATH
from common.config.load import find_config, load_config, override_value
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.repository import ROOT
from common.text import known_hint
from tools.cli.command_line import ParsedCommand
from tools.cli.study import StudyConfig
from tools.evaluate.config import EvalConfig
from tools.offline.config import DpoConfig, EvolveConfig, SftConfig
from tools.simulator.config import SimulatorConfig

DEFAULT_CONFIG = "quickstart"
# Commands with keys of their own. All other commands have `RunConfig`.
SCHEMAS: dict[str, type[RunConfig]] = {
    "sft": SftConfig,
    "dpo": DpoConfig,
    "evolve": EvolveConfig,
    "eval": EvalConfig,
    "serve": PolicyConfig,
    "simulate": SimulatorConfig,
    "bench": StudyConfig,
}


def belongs_to_no_run(request: ParsedCommand) -> bool:
    """Return whether the request names neither a config nor a run."""
    keys = ("run.name", "run.dir")
    named = [key for key in keys if override_value(request.overrides, key) is not None]
    return request.config is None and not named


def load_named(request: ParsedCommand, *, defaults: Sequence[str] = ()) -> Any:
    """Return the config of a request: overrides come after `defaults`; a named run uses its own.

    Its class is that of the command in `SCHEMAS`.
    """
    schema = SCHEMAS.get(request.command, RunConfig)
    overrides = [*defaults, *request.overrides]
    if request.config is None and (name := override_value(overrides, "run.name")) is not None:
        own = own_config(overrides, name)
        if own.is_file():
            return load_config(str(own), overrides, schema=schema)
    named = request.config or DEFAULT_CONFIG
    return load_config(named, overrides, is_dry=request.is_dry, schema=schema)


def load_joined(request: ParsedCommand) -> RunConfig:
    """Return the config of the run that a role joins, or that a command reads.

    Without `run.name` it is the run that `--config` names, or the latest one.

    Raises:
        ConfigError: there is no such run; the message names the nearest one. Only a scheduler
            with `--config` begins a run.
    """
    overrides = request.overrides
    name = override_value(overrides, "run.name")
    if name is None and request.config is not None:
        name = find_config(request.config).stem
    if name is None:
        latest = _folder(overrides) / "latest"
        name = latest.resolve().name if latest.exists() else DEFAULT_CONFIG
    own = own_config(overrides, name)
    if own.is_file():
        return load_config(str(own), overrides)
    if request.command == "scheduler" and request.config is not None:
        return load_config(request.config, overrides)
    # A wrong key is reported before a missing run.
    load_config(request.config or DEFAULT_CONFIG, overrides)
    raise ConfigError(f"run.name={name}: no such run in {own.parents[1]}/{_nearest_run(own)}")


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


def _nearest_run(own: Path) -> str:
    """Return a hint for an unknown run: the most similar name, or how to start a run."""
    known = sorted({path.parent.name for path in own.parents[1].glob("*/config.yaml")} - {"latest"})
    if not known:
        return ", which has no run; start one with `train`"
    return known_hint(own.parent.name, known, form=str)
