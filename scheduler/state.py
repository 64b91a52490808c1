"""Converts the scheduler's state to JSON and back, derived from the fields of dataclasses.

A component is a dataclass. Its fields are saved and restored in place, with two exceptions.
`FIXED` fields hold the configuration and values that can be recomputed; they are never saved.
`VOLATILE` fields hold times of the core's clock and values that every role sends again. They are
saved only if the log that follows will be replayed; otherwise they start with their defaults.
A field with its default value is left out. Frozen dataclasses become plain lists.
"""

import dataclasses
import functools
import types
import typing
from collections import Counter, deque
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

FIXED = types.MappingProxyType({"state": "fixed"})
VOLATILE = types.MappingProxyType({"state": "volatile"})
# Marks a map whose keys come from the configuration. Its entries are restored in place; saved
# entries with other keys are dropped.
CONFIGURED = types.MappingProxyType({"state": "configured"})
_SCALARS = (str, int, float)
# Types of most saved values; JSON holds them unchanged.
_AS_IT_IS = frozenset((str, int, float, bool, types.NoneType))


@dataclasses.dataclass(frozen=True, slots=True)
class _Field:
    """A field of a dataclass, as saved states need it."""

    name: str
    kind: Any
    mark: str  # "" | "volatile" | "configured"
    default: Any
    # Default factory. If `default` and `make` are both MISSING, the field has no default.
    make: Any

    def is_default(self, value: Any) -> bool:
        """Return whether a value equals the field's default."""
        if self.default is not dataclasses.MISSING:
            return value == self.default
        return self.make is not dataclasses.MISSING and not value and value == self.make()

    def new(self) -> Any:
        return self.make() if self.default is dataclasses.MISSING else self.default


@functools.cache
def _fields(cls: type) -> tuple[_Field, ...]:
    """Return the fields that are saved."""
    hints = typing.get_type_hints(cls)
    return tuple(
        _Field(f.name, hints[f.name], f.metadata.get("state", ""), f.default, f.default_factory)
        for f in dataclasses.fields(cls)
        if f.metadata.get("state") != "fixed"
    )


@functools.cache
def _is_frozen(cls: type) -> bool:
    return cls.__dataclass_params__.frozen  # type: ignore[attr-defined]


def save(value: Any, *, with_volatile: bool = False) -> Any:
    """Return a component or a field's value as JSON that shares no objects with it."""
    if type(value) in _AS_IT_IS or isinstance(value, _SCALARS):
        return value
    if isinstance(value, dict):
        return _save_map(value, with_volatile)
    if isinstance(value, list | tuple | deque):
        if value and isinstance(value[0], _SCALARS):
            return list(value)
        return [save(each, with_volatile=with_volatile) for each in value]
    cls: Any = type(value)
    if _is_frozen(cls):
        held_by_all = (getattr(value, f.name) for f in _fields(cls))
        return [content if type(content) in _AS_IT_IS else save(content) for content in held_by_all]
    saved: dict[str, Any] = {}
    for f in _fields(cls):
        content = getattr(value, f.name)
        if (with_volatile or f.mark != "volatile") and not f.is_default(content):
            is_plain = type(content) in _AS_IT_IS
            saved[f.name] = content if is_plain else save(content, with_volatile=with_volatile)
    return saved


def _save_map(value: dict[Any, Any], with_volatile: bool) -> Any:
    """Return a map; if its keys are not all text, as a list of pairs."""
    if all(isinstance(key, str) for key in value):
        return {key: save(each, with_volatile=with_volatile) for key, each in value.items()}
    return [[save(key), save(each, with_volatile=with_volatile)] for key, each in value.items()]


def restore(component: Any, state: Mapping[str, Any]) -> None:
    """Restore the result of `save` in place; then call `after_restore` if the component has it."""
    for f in _fields(type(component)):
        part = getattr(component, f.name)
        if f.mark == "configured":
            for key, entry in part.items():
                restore(entry, state.get(f.name, {}).get(key, {}))
        elif dataclasses.is_dataclass(part) and not _is_frozen(type(part)):
            restore(part, state.get(f.name, {}))
        elif isinstance(part, deque):  # Restored in place, so that the deque keeps its `maxlen`.
            values = _load(f.kind, state.get(f.name, []))
            part.clear()
            part.extend(values)
        else:
            value = _load(f.kind, state[f.name]) if f.name in state else f.new()
            setattr(component, f.name, value)
    after: Callable[[], None] | None = getattr(component, "after_restore", None)
    if after is not None:
        after()


def _load(kind: Any, value: Any) -> Any:
    """Return a value of the type that the field is annotated with."""
    origin = typing.get_origin(kind) or kind
    args = typing.get_args(kind)
    if origin is types.UnionType:
        (some,) = (each for each in args if each is not types.NoneType)
        return None if value is None else _load(some, value)
    if origin is Counter:
        return Counter(_pairs(args[0], int, value))
    if origin is tuple:
        return tuple(_load(each, v) for each, v in zip(args, value, strict=True))
    if issubclass(origin, dict):
        return origin(_pairs(args[0], args[1], value))
    if origin in (list, deque):
        return origin(_load(args[0], each) for each in value)
    if issubclass(origin, Enum):
        return origin(value)
    return _record(origin, value) if dataclasses.is_dataclass(origin) else value


def _record(cls: Any, value: Any) -> Any:
    """Return a dataclass from its saved fields; absent fields keep their defaults."""
    fields = _fields(cls)
    if _is_frozen(cls):
        # Fields added since keep their defaults.
        saved = zip(fields[: len(value)], value, strict=True)
        return cls(**{f.name: _load(f.kind, v) for f, v in saved})
    return cls(**{f.name: _load(f.kind, value[f.name]) for f in fields if f.name in value})


def _pairs(key_kind: Any, kind: Any, value: Any) -> dict[Any, Any]:
    pairs = value.items() if isinstance(value, dict) else value
    return {_load(key_kind, key): _load(kind, each) for key, each in pairs}
