"""Live keys: keys of the configuration that may change while a run works."""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass, replace
from enum import Enum
from typing import Any, cast

from common.config.horizon import HorizonKind
from common.config.keys import conform, declared, dotted
from common.config.learner import OptimizerKind
from common.config.load import parse_text, parse_value
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.wire.config_messages import LiveConfig

logger = logging.getLogger(__name__)


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
    kinds = {cfg.curriculum.held(cfg.horizon.policy(name)).kind for name in names}
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
    found: dict[str, str] = {}
    for key in LIVE_KEYS:
        above, is_in_map, name = key.partition(".NAME.")
        entries = cfg.horizon.per_env if is_in_map else [""]
        for entry in entries:
            own = f"{above}.{entry}.{name}" if is_in_map else key
            found[own] = text_at(cfg, own)
    return found


def with_values(cfg: RunConfig, values: Mapping[str, str]) -> RunConfig:
    """Return a configuration with other values of some keys, checked like that of a new run.

    Raises: ConfigError: a value is wrong, or contradicts another key.
    """
    tree: dict[str, Any] = {}
    for key, text in values.items():
        shown = f"{key}={text}"
        kind, _ = declared(key, shown=shown)
        if "${" in text:
            raise ConfigError(f"{shown}: a value must not refer to another key or a variable")
        *above, last = dotted(key).split(".")
        held = tree
        for name in above:
            held = held.setdefault(name, {})
        held[last] = (
            parse_text(text) if kind is str else conform(parse_value(text, key), kind, key=key)
        )
    return _replaced(cfg, tree)


def _replaced(section: Any, tree: Mapping[str, Any]) -> Any:
    """Return a section with the values of a tree. All of them change before the check."""
    changes = dict[str, Any]()
    for name, value in tree.items():
        held = getattr(section, name)
        if isinstance(held, dict):
            entries = cast(dict[str, Any], held)
            if missing := sorted(value.keys() - entries.keys()):
                law = "the configuration has no such entry, and entries are added at a start only"
                raise ConfigError(f"{name}.{missing[0]}: {law}")
            value = entries | {key: _replaced(entries[key], each) for key, each in value.items()}
        elif is_dataclass(held):
            value = _replaced(held, value)
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
