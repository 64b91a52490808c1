"""The configuration of a run for read-only commands, written by any product version."""

from collections.abc import Callable
from pathlib import Path
from typing import cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from common.config.load import load_config, override_value
from common.config.model import ModelSection
from common.config.run import RunSection
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.store.run_dir import as_map
from tools.cli.command_line import ParsedCommand
from tools.cli.requested import load_joined, own_config
from tools.dashboard.run_state import is_run, parts_of


def load_of_any_version(request: ParsedCommand, *, echo: Callable[[str], None]) -> RunConfig:
    """Return the config of an existing run, written by any product version.

    Unknown keys are ignored with a note. A missing or damaged config also only gives a note.

    Raises: ConfigError: there is no such run, or the request itself is wrong.
    """
    try:
        return load_joined(request)
    except ConfigError as error:
        name = override_value(request.overrides, "run.name")
        if name is None:
            raise
        own = own_config(request.overrides, name)
        if not is_run(own.parent):
            if parts_of(own.parent):  # Commands such as `sft` have worked under this name.
                return _known_part(own)
            raise
        if _is_whole(own):
            raise
        why = f"{own} is missing" if not own.is_file() else str(error)
        reason = " ".join(why.split()).rstrip(".")
        echo(f"note: {reason}. Another version may have written this run; known keys are shown.")
        return _known_part(own)


def _is_whole(own: Path) -> bool:
    """Return whether a run's config loads in this version. If it does, the request is at fault."""
    try:
        load_config(str(own), [])
    except ConfigError:
        return False
    return True


def _known_part(path: Path) -> RunConfig:
    """Return the keys of a run's config.yaml that this version has; the others get defaults."""
    schema = OmegaConf.structured(RunConfig)
    try:
        found: object = yaml.safe_load(path.read_bytes())
    except (OSError, ValueError, yaml.YAMLError):
        found = {}
    kept = {
        section: {k: v for k, v in as_map(keys).items() if k in [*schema[section]]}
        for section, keys in as_map(found).items()
        if section in schema and as_map(keys)
    }
    own = {"name": path.parent.name, "dir": str(path.parents[1])}
    try:
        unset = {"model": {"path": "unknown"}}
        merged = OmegaConf.unsafe_merge(schema, unset, kept, {"run": own})
        return cast(RunConfig, OmegaConf.to_object(merged))
    except (OmegaConfBaseException, ConfigError, ValueError):
        return RunConfig(
            model=ModelSection(path="unknown"), run=RunSection(name=own["name"], dir=own["dir"])
        )
