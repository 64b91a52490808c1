"""Live keys, which may change while a run works, and the record of changed settings.

`config.yaml` of a run always has the values in force, so a role that starts later needs no other
file. `config_changes.jsonl` has one line for each change, with its number and its step. A start
with other settings is a change, too.
"""

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, cast

import yaml

from common.config.horizon import HorizonKind, HorizonSection
from common.config.keys import declared, dotted
from common.config.learner import OptimizerKind
from common.config.load import config_as_yaml, hide_credentials, load_config, parse_override
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.store.disk import AppendFile
from common.store.run_dir import RunDir
from common.store.run_start import SAME_KEYS, save_config
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


# Sections whose keys shape what a run learns or measures.
_RESULT_SECTIONS = (
    "train",
    "model",
    "mixture",
    "horizon",
    "curriculum",
    "groups",
    "algorithm",
    "learner",
    "actor",
    "envs",
    "eval",
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
    section, _, last = dotted(key).rpartition(".")
    if section.partition(".")[0] == "horizon":
        _check_horizon(cfg.horizon, cfg, key)
    if last == "muon_lr" and cfg.learner.optimizer is not OptimizerKind.MUON:
        text = "it has no effect in this run, since it needs learner.optimizer=muon"
        raise ConfigError(f"{key}: {text}")


def _check_horizon(horizon: HorizonSection, cfg: RunConfig, key: str) -> None:
    """Check that a task takes the value of a key of `horizon`. Raises: ConfigError: none does."""
    _, *above, last = dotted(key).split(".")
    entry = above[1] if above else ""
    names = {
        horizon.name_of(env, task.subset) for task in cfg.tasks for env in task.env.split("|")
    } or {"", *horizon.per_env}
    taking = [name for name in sorted(names) if entry in horizon.entries_of(name, last)]
    if not taking:
        raise ConfigError(
            f"{key}: it has no effect in this run, since all tasks have {last} of their own:"
            f" horizon.per_env has {', '.join(sorted(names & horizon.per_env.keys()))}"
        )
    kinds = {cfg.curriculum.effective(horizon.policy(name)).kind for name in taking}
    needed = {"every_steps": HorizonKind.STEPWISE, "over_steps": HorizonKind.LINEAR}.get(last)
    if needed is not None and needed not in kinds:
        text = f"it has no effect in this run, since it needs horizon.kind={needed.value}"
        raise ConfigError(f"{key}: {text}")


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
    recorded as a change. Other settings that differ from those of the run are recorded, too.
    """
    changes = read_changes(run_dir.config_changes)
    old, new = _other_settings(cfg, run_dir)
    unchanged: dict[str, str] = {}
    chosen: dict[str, str] = {}
    last = last_values(changes)
    for key, value in last.items():
        if not is_live(key):
            continue
        configured = text_at(cfg, key)
        began_with = next(change.old[key] for change in changes if key in change.old)
        if not configured:  # The command has no such entry of a map.
            continue
        if configured == began_with:
            unchanged[key] = value
        elif configured != value:
            chosen[key] = configured
    if chosen or new:
        change = ConfigChange(
            number=changes[-1].number + 1 if changes else 1,
            step=-1,
            time_s=now_s,
            request="",
            old={key: last[key] for key in chosen} | old,
            new=chosen | new,
        )
        append_change(run_dir, change)
        shown = ", ".join(f"{key}: was {change.old[key]}, now {change.new[key]}" for key in new)
        if shown:
            text = "the run continues with other settings, which are change %d of its record: %s"
            logger.warning(text, change.number, shown)
    unchanged = {key: value for key, value in unchanged.items() if text_at(cfg, key) != value}
    return with_values(cfg, unchanged) if unchanged else cfg


def _other_settings(cfg: RunConfig, run_dir: RunDir) -> tuple[dict[str, str], dict[str, str]]:
    """Return the stored and the new values of settings that differ and shape results.

    Live keys have rules of their own. A key that the stored configuration lacks is of a later
    version of the product.
    """
    if not run_dir.config.is_file():
        return {}, {}
    stored = _leaves(yaml.safe_load(run_dir.config.read_bytes()))
    present = _leaves(yaml.safe_load(config_as_yaml(cfg)))
    keys = [
        key
        for key, value in present.items()
        if key.partition(".")[0] in _RESULT_SECTIONS
        and not is_live(key)
        and key not in (*SAME_KEYS, "model.date")
        and stored.get(key, value) != value
    ]
    old, new = ({key: hide_credentials(tree[key]) for key in keys} for tree in (stored, present))
    return old, new


def _leaves(tree: Any, above: str = "") -> dict[str, str]:
    """Return the values of a tree by dotted key, as texts."""
    if not isinstance(tree, dict) or not tree:
        return {above: tree if isinstance(tree, str) else json.dumps(tree)}
    values: dict[str, str] = {}
    for name, value in cast(dict[Any, Any], tree).items():
        values |= _leaves(value, f"{above}.{name}" if above else str(name))
    return values


def last_values(changes: Iterable[ConfigChange]) -> Mapping[str, str]:
    """Return the last value of each changed key."""
    values: dict[str, str] = {}
    for change in changes:
        values |= change.new
    return values
