"""The record of a run's live changes, and their effect on its next start.

`config.yaml` of a run always has the values in force, so a role that starts later needs no other
file. `config_changes.jsonl` has one line for each change, with its number and its step.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from common.config.live.keys import text_at, with_values
from common.config.load import load_config
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.repository import ROOT
from common.store.disk import AppendFile
from common.store.run_dir import RunDir
from common.store.run_start import save_config

REMEDY = "restore it from a backup, or remove the line; config.yaml has the values in force"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigChange:
    """One change of live keys."""

    number: int  # From 1, in the order of the changes.
    step: int  # Last step before the change; -1: the run was started again with other values.
    time_s: float  # Unix time
    request: str  # Random name of the request; "" for a start.
    old: dict[str, str]
    new: dict[str, str]


def read_changes(path: Path) -> list[ConfigChange]:
    """Return the changes of a run so far; [] without a file.

    A last line without its end was cut off by a crash and does not count.

    Raises: ConfigError: a line is damaged; names file and line.
    """
    if not path.is_file():
        return []
    changes: list[ConfigChange] = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            break
        try:
            changes.append(ConfigChange(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path}: line {number} is damaged ({error!r}); {REMEDY}") from error
    return changes


def last_number(path: Path) -> int:
    """Return the number of a run's last change, 0 without one. Raises: ConfigError."""
    changes = read_changes(path)
    return changes[-1].number if changes else 0


def record_change(run_dir: RunDir, cfg: RunConfig, change: ConfigChange) -> None:
    """Write a change to `config.yaml`, then to the record.

    Args:
        cfg: configuration for a run directory without `config.yaml`.

    Raises: OSError: the disk is full; both files are whole, and the call can be repeated.
    """
    path = run_dir.config
    known = load_config(str(path), [], root=ROOT) if path.is_file() else cfg
    save_config(with_values(known, change.new), path)
    append_change(run_dir, change)


def append_change(run_dir: RunDir, change: ConfigChange) -> None:
    """Append a change to the record. Raises: OSError: the disk is full; the file is unchanged."""
    path = run_dir.config_changes
    whole = path.read_bytes() if path.is_file() else b""
    file = AppendFile(path)
    try:
        file.truncate(whole.rfind(b"\n") + 1)  # Removes a line that a crash cut off.
        file.append([json.dumps(asdict(change)).encode() + b"\n"])
    finally:
        file.close()


def with_changes(cfg: RunConfig, run_dir: RunDir, *, now_s: float) -> RunConfig:
    """Return the configuration for the next start of a run, with the live changes of earlier ones.

    A changed key keeps its last value if the command gives the value before the first change, since
    the command is then the one that began the run. Any other value is a new choice: it is used, and
    recorded as a change.
    """
    changes = read_changes(run_dir.config_changes)
    kept: dict[str, str] = {}
    chosen: dict[str, str] = {}
    last = last_values(changes)
    for key, value in last.items():
        given = text_at(cfg, key)
        began_with = next(each.old[key] for each in changes if key in each.old)
        if not given:  # The command has no such entry of a map.
            continue
        if given == began_with:
            kept[key] = value
        elif given != value:
            chosen[key] = given
    if chosen:
        change = ConfigChange(
            number=changes[-1].number + 1,
            step=-1,
            time_s=now_s,
            request="",
            old={key: last[key] for key in chosen},
            new=chosen,
        )
        append_change(run_dir, change)
    kept = {key: value for key, value in kept.items() if text_at(cfg, key) != value}
    return with_values(cfg, kept) if kept else cfg


def last_values(changes: Iterable[ConfigChange]) -> Mapping[str, str]:
    """Return the last value of each changed key."""
    found: dict[str, str] = {}
    for change in changes:
        found |= change.new
    return found
