"""Live keys, which may change while a run works, and the record of their changes.

`config.yaml` of a run always has the values in force, so a role that starts later needs no other
file. `config_changes.jsonl` has one line for each change, with its number and its step.
"""

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, cast

from common.config.horizon import HorizonKind
from common.config.keys import declared, dotted
from common.config.learner import OptimizerKind
from common.config.load import load_config, parse_override
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.store.disk import AppendFile
from common.store.run_dir import RunDir
from common.store.run_start import save_config
from common.wire.messages import LiveConfig

logger = logging.getLogger(__name__)

REMEDY = "restore it from a backup, or remove the line; config.yaml has the values in force"


# Every part that uses one of these keys can replace its value between two steps. NAME stands for
# an entry of a map. Other keys belong to existing data, to allocated memory, or to the objective:
# `actor.temperature` for example is part of the log-probabilities of sampled tokens.
LIVE_KEYS = (
    "train.num_steps",
    "horizon.stages",
    "horizon.every_steps",
    "horizon.over_steps",
    "horizon.per_env.NAME.stages",
    "horizon.per_env.NAME.every_steps",
    "horizon.per_env.NAME.over_steps",
    "learner.lr",
    "learner.muon_lr",
    "learner.max_lag_steps",
    "learner.checkpoint_every_steps",
    "learner.checkpoint_every_s",
    "learner.keep_checkpoints",
    "actor.max_concurrent",
    "actor.min_concurrent",
    "eval.every_steps",
)


_PATTERN = re.compile("|".join(re.escape(key).replace("NAME", "[^.]+") for key in LIVE_KEYS))


def is_live(key: str) -> bool:
    """Return whether a key may change while a run works."""
    return _PATTERN.fullmatch(dotted(key)) is not None


def check_live(key: str) -> None:
    """Check that a key is live. Raises: ConfigError: it is not; lists the live keys."""
    declared(key, shown=key)
    if not is_live(key):
        raise ConfigError(
            f"{key}: this key cannot change during a run. Stop the run and start it again with"
            f" another value. The live keys are: {', '.join(LIVE_KEYS)}"
        )


def check_effect(cfg: RunConfig, key: str) -> None:
    """Check that a live key has an effect in a run. Raises: ConfigError: it has none."""
    names = ("", *cfg.horizon.per_env)
    kinds = {cfg.curriculum.effective(cfg.horizon.policy(name)).kind for name in names}
    needed = {
        "every_steps": ("horizon.kind=stepwise", HorizonKind.STEPWISE in kinds),
        "over_steps": ("horizon.kind=linear", HorizonKind.LINEAR in kinds),
        "muon_lr": ("learner.optimizer=muon", cfg.learner.optimizer is OptimizerKind.MUON),
    }
    section, _, last = dotted(key).rpartition(".")
    setting, is_there = needed.get(last, ("", True))
    if section != "eval" and not is_there:
        raise ConfigError(f"{key}: it has no effect in this run, since it needs {setting}")


def text_at(cfg: RunConfig, key: str) -> str:
    """Return the value of a key as in an override; "" for a key of an absent entry of a map."""
    value: Any = cfg
    for part in dotted(key).split("."):
        if value is None:
            return ""
        if isinstance(value, dict):
            value = cast(dict[str, Any], value).get(part)
        else:
            value = getattr(value, part)
    plain = value.value if isinstance(value, Enum) else value
    return plain if isinstance(plain, str) else json.dumps(plain)


def live_values(cfg: RunConfig) -> dict[str, str]:
    """Return the values of all live keys, and of those in present entries of maps."""
    values: dict[str, str] = {}
    for key in LIVE_KEYS:
        above, is_in_map, name = key.partition(".NAME.")
        entries = cfg.horizon.per_env if is_in_map else [""]
        for entry in entries:
            entry_key = f"{above}.{entry}.{name}" if is_in_map else key
            values[entry_key] = text_at(cfg, entry_key)
    return values


def with_values(cfg: RunConfig, values: Mapping[str, str]) -> RunConfig:
    """Return a configuration with other values of some keys, checked like that of a new run.

    Raises: ConfigError: a value is wrong, or contradicts another key.
    """
    tree: dict[str, Any] = {}
    for key, text in values.items():
        value = parse_override(key, text)
        if "${" in text:
            raise ConfigError(f"{key}={text}: a value must not refer to another key or a variable")
        *above, last = dotted(key).split(".")
        section = tree
        for name in above:
            section = section.setdefault(name, {})
        section[last] = value
    return _replaced(cfg, tree)


def _replaced(section: Any, tree: Mapping[str, Any]) -> Any:
    """Return a section with the values of a tree. All of them change before the check."""
    changes = dict[str, Any]()
    for name, value in tree.items():
        present = getattr(section, name)
        if isinstance(present, dict):
            entries = cast(dict[str, Any], present)
            if missing := sorted(value.keys() - entries.keys()):
                law = "the configuration has no such entry, and entries are added at a start only"
                raise ConfigError(f"{name}.{missing[0]}: {law}")
            value = entries | {key: _replaced(entries[key], entry) for key, entry in value.items()}
        elif is_dataclass(present):
            value = _replaced(present, value)
        changes[name] = value
    return replace(section, **changes)


def changed_values(cfg: RunConfig, live: LiveConfig, sections: Sequence[str]) -> dict[str, str]:
    """Return the live values of some sections that differ from a configuration."""
    return {
        key: value
        for key, value in live.values.items()
        if key.partition(".")[0] in sections and text_at(cfg, key) != value
    }


def followed(cfg: RunConfig, live: LiveConfig | None, sections: Sequence[str]) -> RunConfig:
    """Return the configuration of a role with the live values of its sections.

    The result is `cfg` itself if nothing differs, or if `live` is None.
    """
    changed = {} if live is None else changed_values(cfg, live, sections)
    if not changed or live is None:
        return cfg
    shown = " ".join(f"{key}={value}" for key, value in changed.items())
    logger.info("live configuration number=%d %s", live.number, shown)
    return with_values(cfg, changed)


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
    stored = load_config(str(path), []) if path.is_file() else cfg
    save_config(with_values(stored, change.new), path)
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
    unchanged: dict[str, str] = {}
    chosen: dict[str, str] = {}
    last = last_values(changes)
    for key, value in last.items():
        configured = text_at(cfg, key)
        began_with = next(change.old[key] for change in changes if key in change.old)
        if not configured:  # The command has no such entry of a map.
            continue
        if configured == began_with:
            unchanged[key] = value
        elif configured != value:
            chosen[key] = configured
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
    unchanged = {key: value for key, value in unchanged.items() if text_at(cfg, key) != value}
    return with_values(cfg, unchanged) if unchanged else cfg


def last_values(changes: Iterable[ConfigChange]) -> Mapping[str, str]:
    """Return the last value of each changed key."""
    values: dict[str, str] = {}
    for change in changes:
        values |= change.new
    return values
