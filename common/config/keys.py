"""The schema of `RunConfig`: existing keys, their expected types, and the nearest valid key."""

import difflib
import json
import logging
import re
from dataclasses import Field, fields, is_dataclass
from enum import Enum
from functools import cache
from types import UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

from omegaconf import MISSING

from common.config.run_config import RunConfig
from common.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_WHOLE = 1 << 1000  # Numbers below this can be compared with a float.
# Short forms of keys, with the whole keys.
SHORT_KEYS = {"data": "envs.dataset", "reward": "envs.dataset.reward"}
KIND = "kind"  # A text in place of a section is the value of its key of this name, if it has one.
# Values that a key had in the release before, and the values that are used for them.
REMOVED_VALUES = {("learner.weights_transport", "file"): "auto"}
# Keys and sections that only the named commands have. Their classes lie beside the code of these
# commands. A file may have them for all commands.
COMMAND_KEYS = {
    "sft": "sft and evolve",
    "dpo": "dpo",
    "evolve": "evolve",
    "policy": "eval and serve",
    "eval.k": "eval",
    "eval.items": "eval",
    "eval.label": "eval",
    "eval.max_failed_frac": "eval",
    "simulator": "simulate",
    "study": "bench",
}
# Keys that the release before had, with their only allowed value; None: any value is ignored.
REMOVED_KEYS: dict[str, float | None] = {
    "actor.top_p": 1.0,
    "actor.top_k": -1,
    "log.otlp_every_s": None,  # A collector reads the page of log.metrics_port.
}
# Keys with another name since the release before.
RENAMED_KEYS = {
    "envhub.session_lease_s": "envhub.session_idle_s",
    "envhub.agentgym_lease_s": "envhub.agentgym_idle_s",
    "learner.gradient_checkpointing": "learner.activations",
}
# Values of the new name for those of a renamed key.
RENAMED_VALUES: dict[str, dict[Any, Any]] = {
    "learner.gradient_checkpointing": {True: "recompute", False: "keep"}
}
NEAR_LAST_FRAC = 0.7  # Smallest similarity of a suggested key's last word.
MAX_NAMES_CHARS = 400  # A longer list of a section's keys is not shown.
Tree = dict[str, Any]  # Values by key; sections are trees again.
_KEY = re.compile(r"[A-Za-z_]\w*(\.\w+(/\w+)?|\[\d+\])*")
_WORDS = {
    Any: "text, or a map from names to values",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
}


def renamed_value(key: str, value: Any) -> Any:
    """Return the value of a renamed key under its new name. Raises: ConfigError: no such value."""
    values = RENAMED_VALUES.get(key)
    if values is None:
        return value
    if not isinstance(value, bool) or value not in values:
        raise ConfigError(f"{key}={show(value)}: expects {_WORDS[bool]}")
    return values[value]


@cache
def field_kinds(section: Any) -> dict[str, Any]:
    """Return the field names of a config section with their types."""
    hints = get_type_hints(section)
    return {field.name: hints[field.name] for field in fields(section)}


def default_value(kind: Any) -> Any:
    """Return the value of a new place of a type: a section with its defaults, or an empty one."""
    if is_dataclass(kind):
        return default_tree(kind)
    empty: dict[Any, Any] = {list: [], dict: {}}
    return empty.get(get_origin(kind))


def default_tree(section: Any) -> Tree:
    """Return the defaults of a section by key. `MISSING` stands for values that have none."""
    return {
        field.name: default_tree(kind) if is_dataclass(kind) else default_of(field)
        for field, kind in zip(fields(section), field_kinds(section).values(), strict=True)
    }


def default_of(field: Field[Any]) -> Any:
    """Return the default of a key."""
    return field.default_factory() if callable(field.default_factory) else field.default


def build(kind: Any, value: Any, *, key: str) -> Any:
    """Return a checked tree as instances of the classes of its sections.

    Raises: ConfigError: a key without a default has no value.
    """
    if is_dataclass(kind):
        values = default_tree(kind) | value
        for field in fields(kind):
            name = f"{key}.{field.name}" if key else field.name
            if values[field.name] == MISSING:
                text = field.metadata["text"]
                raise ConfigError(f"{name} is not set: give {name}=... ({text})")
            values[field.name] = build(field_kinds(kind)[field.name], values[field.name], key=name)
        return cast(Any, kind)(**values)
    if get_origin(kind) is list:
        (item,) = get_args(kind)
        return [build(item, entry, key=f"{key}[{i}]") for i, entry in enumerate(value)]
    if get_origin(kind) is dict:
        item = get_args(kind)[1]
        return {name: build(item, entry, key=f"{key}.{name}") for name, entry in value.items()}
    return value


@cache
def list_keys(schema: type[RunConfig] = RunConfig) -> tuple[str, ...]:
    """Return every dotted key of the configuration. Index 0 represents all items of a list."""

    def walk(section: Any, prefix: str) -> list[str]:
        """Return the dotted keys below a section."""
        keys: list[str] = []
        for name, kind in field_kinds(section).items():
            if is_dataclass(kind):
                keys += walk(kind, f"{prefix}{name}.")
                continue
            keys.append(f"{prefix}{name}")
            if get_origin(kind) is list and is_dataclass(get_args(kind)[0]):
                keys += walk(get_args(kind)[0], f"{prefix}{name}[0].")
        return keys

    return tuple(walk(schema, ""))


def key_hint(key: str, schema: type[RunConfig] = RunConfig) -> str:
    """Return the end of an error about an unknown key: the nearest key, or where to find them."""
    if commands := commands_of(dotted(key), schema):
        return f"; it belongs to {commands}"
    near = nearest_keys(key, schema)
    section, kind = _section_of(key, schema)
    if near and (not section or near.startswith(f"{section}.")):
        return f"; the nearest is {near}"
    if not section:
        return "; `python run.py help` lists the sections, `python run.py help reference` all keys"
    elsewhere = f"; {near} is a key of another section" if near else ""
    names = ", ".join(field_kinds(kind))
    if len(names) > MAX_NAMES_CHARS:
        return f"; `python run.py help {section}` lists the keys of this section{elsewhere}"
    return f"; {section} has the keys {names}{elsewhere}"


def commands_of(key: str, schema: type[RunConfig]) -> str:
    """Return the commands to which a key of another schema belongs; "" if there are none."""
    for name, commands in COMMAND_KEYS.items():
        if f"{key}.".startswith(f"{name}.") and not has_key(name, schema):
            return commands
    return ""


def has_key(key: str, schema: type[RunConfig]) -> bool:
    """Return whether a schema has a key or a section of this dotted name."""
    kind: Any = schema
    for name in key.split("."):
        kind = field_kinds(kind).get(name) if is_dataclass(kind) else None
    return kind is not None


def nearest_keys(key: str, schema: type[RunConfig]) -> str:
    """Return the most similar valid key, or the keys with the same last word, as "a or b".

    "": no key is similar.
    """
    last = key.rsplit(".", 1)[-1]
    if "." not in key:
        namesakes = [
            candidate for candidate in list_keys(schema) if candidate.rsplit(".", 1)[-1] == last
        ]
        sections = difflib.get_close_matches(key, list(field_kinds(schema)), n=1, cutoff=0.7)
        if namesakes or sections:
            return " or ".join(map(_shortest, namesakes[:3] or sections))

    def likeness(candidate: str) -> tuple[float, float]:
        """Return the similarity of a key's last word, and of the whole key."""
        by_last = difflib.SequenceMatcher(None, candidate.rsplit(".", 1)[-1], last).ratio()
        return by_last, difflib.SequenceMatcher(None, candidate, key).ratio()

    best = max(list_keys(schema), key=lambda candidate: sum(likeness(candidate)))
    return _shortest(best) if likeness(best)[0] >= NEAR_LAST_FRAC else ""


def _section_of(key: str, schema: type[RunConfig]) -> tuple[str, Any]:
    """Return the existing section in which an unknown key begins, and its class; "" for none."""
    names: list[str] = []
    kind: Any = schema
    for part in dotted(key).split("."):
        below = field_kinds(kind).get(part)
        if not is_dataclass(below):
            break
        names.append(part)
        kind = below
    return _shortest(".".join(names)), kind


def _shortest(key: str) -> str:
    """Return a key in its short form, if it has one."""
    for short, whole in sorted(SHORT_KEYS.items(), key=lambda pair: -len(pair[1])):
        if key == whole or key.startswith(f"{whole}."):
            return short + key.removeprefix(whole)
    return key


def choices_of(kind: Any) -> type[Enum] | None:
    """Return the enum of a type: the type itself, or the first part of "Enum | str"."""
    named = get_args(kind)[0] if get_origin(kind) is UnionType else kind
    return named if isinstance(named, type) and issubclass(named, Enum) else None


def describe_kind(kind: Any) -> str:
    """Return a text about the values that a key of this type accepts."""
    if is_dataclass(kind):
        names = field_kinds(kind)
        text = f", or a text for its {KIND}" if KIND in names else ""
        return f"a section with {', '.join(names)}{text}"
    if get_origin(kind) is list:
        (item,) = get_args(kind)
        if named := choices_of(item):
            values = [str(member.value) for member in named]
            last = "" if named is item else ", module:function, file.py:function"
            return f"a list of {', '.join(values)}{last}, like [{', '.join(values[:2])}]"
        many = {int: "whole numbers", float: "numbers", str: "texts"}.get(item, "sections")
        return f"a list of {many}, like [a, b]"
    if get_origin(kind) is dict:
        below = get_args(kind)[1]
        if is_dataclass(below):
            return f"a map from names to sections with {', '.join(field_kinds(below))}"
        return f"a map from names to {'values' if below is Any else 'texts'}, like {{a: b}}"
    if named := choices_of(kind):
        last = "" if named is kind else ", module:function, file.py:function"
        return f"one of {', '.join(str(member.value) for member in named)}{last}"
    return _WORDS[kind]


def declared(
    key: str, *, shown: str, schema: type[RunConfig] = RunConfig
) -> tuple[Any, Field[Any]]:
    """Return the type that a dotted key expects, and the field that declares it.

    Args:
        key: in the user's notation; `tasks[0].weight` and `tasks.0.weight` are both valid.
        shown: key and value for the message.

    Raises: ConfigError: there is no such key; the message names the nearest one, see `key_hint`.
    """
    if not _KEY.fullmatch(key):
        raise ConfigError(f"{shown}: not a key{key_hint(key, schema)}")
    kind: Any = schema
    field: Field[Any] = fields(schema)[0]
    for part in dotted(key).split("."):
        if is_dataclass(kind) and part in field_kinds(kind):
            (field,) = (each for each in fields(kind) if each.name == part)
            kind = field_kinds(kind)[part]
        elif get_origin(kind) is list and part.isdigit():
            (kind,) = get_args(kind)
        elif get_origin(kind) is dict:
            kind = get_args(kind)[1]
        elif kind is Any:  # A value of any type may be a map itself.
            pass
        else:
            raise ConfigError(f"{shown}: no such key{key_hint(key, schema)}")
    return kind, field


def dotted(key: str) -> str:
    """Return `a[0].b` as `a.0.b`, and a short key such as `data.train` as its whole key."""
    first, dot, rest = re.sub(r"\[(\d+)\]", r".\1", key).partition(".")
    return f"{SHORT_KEYS.get(first, first)}{dot}{rest}"


def expand_sections(sections: dict[Any, Any]) -> dict[Any, Any]:
    """Return the sections of a YAML file with those of SHORT_KEYS at their whole keys.

    Raises: ConfigError: a key has two values, one by its short and one by its whole form.
    """
    for short, whole in SHORT_KEYS.items():
        if short in sections:
            settings = sections.pop(short)
            for name in reversed(whole.split(".")):
                settings = {name: settings}
            _add(sections, settings, short=short, key="")
    return sections


def _add(tree: dict[Any, Any], added: dict[Any, Any], *, short: str, key: str) -> None:
    """Add the values of a short key to a tree. Raises: ConfigError: a key has a value already."""
    for name, value in added.items():
        place = f"{key}.{name}" if key else f"{name}"
        present = tree.get(name)
        if present is None:
            tree[name] = value
        elif isinstance(present, dict) and isinstance(value, dict):
            below = cast(dict[Any, Any], present)
            _add(below, cast(dict[Any, Any], value), short=short, key=place)
        else:
            raise ConfigError(f"{place} is given twice; {short} is its short form")


def conform(value: Any, kind: Any, *, key: str, schema: type[RunConfig] = RunConfig) -> Any:
    """Return `value` after a check against `kind`, with names replaced by enum members.

    An interpolation ("${...}") of a single value is returned unchanged.

    Raises:
        ConfigError: an unknown key or a wrong type at any depth. The message has the key, its
            value and the expected type.
    """
    origin: Any = get_origin(kind)
    is_leaf = origin in (None, UnionType) and not is_dataclass(kind)
    if is_leaf and isinstance(value, str) and value.startswith("${"):
        return value
    if is_dataclass(kind) and isinstance(value, str) and KIND in field_kinds(kind):
        value = {KIND: value}
    if is_dataclass(kind) and isinstance(value, dict):
        tree = cast(dict[Any, Any], value)
        kinds = field_kinds(kind)
        below = {name: f"{key}.{name}" if key else f"{name}" for name in tree}
        for name in tree:
            if name not in kinds:
                wrong, leaf = _first_leaf(below[name], tree[name])
                raise ConfigError(f"{wrong}={show(leaf)}: no such key{key_hint(wrong, schema)}")
        return {
            name: conform(entry, kinds[name], key=below[name], schema=schema)
            for name, entry in tree.items()
        }
    if kind is Any:
        return value
    if origin is list and isinstance(value, list):
        (item,) = get_args(kind)
        entries = enumerate(cast(list[Any], value))
        return [conform(entry, item, key=f"{key}[{i}]", schema=schema) for i, entry in entries]
    if origin is dict and isinstance(value, dict):
        item = get_args(kind)[1]
        tree = cast(dict[Any, Any], value)
        if all(isinstance(name, str) for name in tree):
            return {
                name: conform(entry, item, key=f"{key}.{name}", schema=schema)
                for name, entry in tree.items()
            }
    if is_leaf:
        return _conform_leaf(value, kind, key)
    raise ConfigError(f"{key}={show(value)}: expects {describe_kind(kind)}")


def show(value: Any) -> str:
    """Return a value in YAML notation, shortened."""
    text = json.dumps(value) if value is None or isinstance(value, bool) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _first_leaf(key: str, value: Any) -> tuple[str, Any]:
    """Return the first key below `key` that holds a plain value, and this value."""
    if isinstance(value, dict) and value:
        name, below = next(iter(cast(dict[Any, Any], value).items()))
        return _first_leaf(f"{key}.{name}", below)
    return key, cast(Any, value)


@cache
def _warn_once(text: str) -> None:
    """Log a warning, once for a process that loads its configuration several times."""
    logger.warning("%s", text)


def _conform_leaf(value: Any, kind: Any, key: str) -> Any:
    """Return a plain value as its type. Raises: ConfigError: it has another type.

    The type "Enum | str" is a member of the enum, or the name of a function, which has a colon.
    """
    if choices := choices_of(kind):
        by_name = {str(member.value).lower(): member for member in choices}
        named = value.value if isinstance(value, Enum) else value
        if isinstance(named, bool):  # YAML reads the words on, off, true and false as booleans.
            words = ("true", "on") if named else ("false", "off")
            named = next((word for word in words if word in by_name), words[0])
        if isinstance(named, str) and (key, named.lower()) in REMOVED_VALUES:
            used = REMOVED_VALUES[key, named.lower()]
            _warn_once(f"{key}={named} is removed and will be refused; {key}={used} is used")
            named = used
        member = by_name.get(named.lower()) if isinstance(named, str) else None
        if member is not None:
            return member
        if choices is not kind and isinstance(named, str) and ":" in named:
            return named
    elif kind is str and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return str(value)
    elif kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        if isinstance(value, float) or abs(value) < MAX_WHOLE:
            return float(value)
    elif kind in (int, bool) and type(value) is kind and abs(value) < MAX_WHOLE:
        return value
    raise ConfigError(f"{key}={show(value)}: expects {describe_kind(kind)}")
