"""The configuration of a run for a node whose code is older and lacks some keys."""

import dataclasses
import logging
from collections.abc import Collection, Iterator, Sequence
from typing import Any, cast

import yaml

from common.config.keys import field_kinds
from common.config.run_config import RunConfig

logger = logging.getLogger(__name__)


def default_keys(cfg: RunConfig, sections: Sequence[str]) -> list[str]:
    """Return the dotted keys of these sections whose value is the default of this code."""
    return [key for key in _default_keys(cfg, "") if key.partition(".")[0] in sections]


def _default_keys(section: Any, prefix: str) -> Iterator[str]:
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from _default_keys(value, f"{prefix}{field.name}.")
            continue
        make = field.default_factory
        default = field.default if make is dataclasses.MISSING else make()
        if value == default:
            yield f"{prefix}{field.name}"


def without_unknown(config: str, defaults: Collection[str]) -> str:
    """Return YAML sections without the keys that this code does not have.

    A key that is not in `defaults` remains: the run has changed a setting that this code cannot
    follow, and loading the configuration reports the key.
    """
    tree = yaml.safe_load(config)
    dropped = list(_drop_unknown(tree, RunConfig, "", defaults))
    if dropped:
        logger.info("ignored keys of newer code, which have their defaults: %s", ", ".join(dropped))
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def _drop_unknown(
    tree: dict[str, Any], section: Any, prefix: str, defaults: Collection[str]
) -> Iterator[str]:
    """Remove unknown keys with default values below a section; yield them."""
    kinds = field_kinds(section)
    for name, value in list(tree.items()):
        key = f"{prefix}{name}"
        if name not in kinds and defaults and all(each in defaults for each in _leaves(key, value)):
            del tree[name]
            yield key
        elif dataclasses.is_dataclass(kinds.get(name)) and isinstance(value, dict):
            below = cast(dict[str, Any], value)
            yield from _drop_unknown(below, kinds[name], f"{key}.", defaults)


def _leaves(key: str, value: Any) -> Iterator[str]:
    """Yield the dotted keys of the plain values below a key, and the key of an empty map."""
    if isinstance(value, dict) and value:
        for name, below in cast(dict[str, Any], value).items():
            yield from _leaves(f"{key}.{name}", below)
    else:
        yield key
