"""Encodes messages as ZeroMQ frames: a msgpack header and one raw frame per array. No pickle.

The header is [schema version, type name, {field: value}]. An array field holds
[frame index, dtype, shape]. The decoder checks the type of every field against the dataclass.
A damaged or foreign message therefore raises `WireError` here and never later.
`common.wire.versions` has the rules for peers of another schema version.
"""
# msgpack has no type stubs. An unpacked value has no static type until the decoder has checked it:
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

import dataclasses
import functools
import math
import threading
import typing
from collections.abc import Callable
from enum import StrEnum
from operator import attrgetter
from typing import Any

import msgpack
import numpy as np

from common.errors import MessageTooLarge, WireError
from common.weights import messages as weight_messages
from common.wire import config_messages, join_messages, messages, rank_messages
from common.wire.access.bounds import (
    ITEM_CHARS,
    MAX_FRAME_BYTES,
    MAX_FRAMES,
    MAX_HEADER_BYTES,
    MAX_MESSAGE_BYTES,
    AtMost,
    Between,
    bounds_of,
    shown,
)
from common.wire.messages import SCHEMA_VERSION, EpisodeIdentity
from common.wire.versions import (
    CONVERSIONS,
    OLDEST_RECORD,
    PREVIOUS_VERSION,
    REJECTED,
    Conversions,
    is_in,
    lowered,
    raised,
    refusal,
)

MAX_AXES = 8
MAX_AXIS = 1 << 28  # Maximum length of one axis of an array.
ARRAY_DTYPES = ("int32", "float32", "bool", "uint8", "int16")

_DTYPE_NAMES = {np.dtype(name): name for name in ARRAY_DTYPES}

MESSAGE_TYPES: dict[str, type] = {
    name: cls
    for module in (messages, join_messages, rank_messages, weight_messages, config_messages)
    for name, cls in vars(module).items()
    if isinstance(cls, type) and dataclasses.is_dataclass(cls) and cls is not EpisodeIdentity
}


def encode(
    message: Any, version: int = SCHEMA_VERSION, *, conversions: Conversions = CONVERSIONS
) -> list[bytes]:
    """Return the frames of a message: the header, then one frame per array field.

    Args:
        version: schema version that the receiver understands.
        conversions: between versions, see `common.wire.versions`.

    Raises:
        WireError: the object is not a message, the version does not have it, or an array has an
            unsupported dtype.
        MessageTooLarge: the message exceeds a size limit, so every receiver would reject it.
    """
    name = type(message).__name__
    if MESSAGE_TYPES.get(name) is not type(message):
        raise WireError(f"{name} is not a message")
    form = max(version, OLDEST_RECORD)  # A refusal has the same form in still older versions.
    if form < SCHEMA_VERSION and not is_in(form, name):
        raise WireError(f"{name} is no message of schema version {version}")
    frames: list[bytes] = []
    fields = _to_map(type(message), form)(message, frames)
    if form < SCHEMA_VERSION:
        fields = lowered(fields, name, form, conversions)
    header = [version, name, fields]
    encoded = [_pack(header), *frames]
    if reason := _beyond_limits(encoded):
        raise MessageTooLarge(f"{name}: {reason}")
    return encoded


def _beyond_limits(frames: list[bytes]) -> str:
    """Return an error text for the first size limit that the frames exceed, "" if none."""
    if len(frames) > MAX_FRAMES:
        return f"too many frames: {len(frames)}, at most {MAX_FRAMES}"
    sizes = list(map(len, frames))
    if sizes[0] > MAX_HEADER_BYTES:
        return f"a header of {sizes[0]} bytes is over the size limit of {MAX_HEADER_BYTES}"
    if max(sizes) > MAX_FRAME_BYTES:
        return f"an array of {max(sizes)} bytes is over the size limit of {MAX_FRAME_BYTES}"
    if sum(sizes) > MAX_MESSAGE_BYTES:
        return f"a total of {sum(sizes)} bytes is over the size limit of {MAX_MESSAGE_BYTES}"
    return ""


def decode(
    frames: list[bytes], *, oldest: int = PREVIOUS_VERSION, conversions: Conversions = CONVERSIONS
) -> Any:
    """Return the message that `encode` turned into these frames.

    Args:
        oldest: oldest schema version that is accepted.
        conversions: between versions, see `common.wire.versions`.

    Raises:
        WireError: not msgpack, a schema version out of range, an unknown message type, an unknown
            field, a missing field without a default, a value of the wrong type or out of bounds, or
            an array that does not match its frame. The error text is short for any input.
    """
    if not frames:
        raise WireError("no header")
    if reason := _beyond_limits(frames):
        raise WireError(reason)
    header = _unpack(frames[0], "header")
    if not isinstance(header, list) or len(header) != 3:
        raise WireError("header is not [schema, type, fields]")
    schema, name, fields = header
    is_read = type(schema) is int and (oldest <= schema <= SCHEMA_VERSION or name == REJECTED)
    if not is_read:
        raise WireError(refusal(schema, fields))
    cls = MESSAGE_TYPES.get(name) if isinstance(name, str) else None
    if cls is None:
        raise WireError(f"unknown message type {shown(name)}")
    if schema < SCHEMA_VERSION and isinstance(fields, dict):
        fields = raised(fields, name, schema, conversions)
    try:
        return _as_sent(cls)(fields, frames)
    except _NotAsSent:
        return _from_plain(cls, fields, frames, path=name)


def pack_record(message: Any) -> bytes:
    """Return one message as a single byte string (journal records)."""
    return pack_frames(encode(message))


def pack_frames(frames: list[bytes]) -> bytes:
    """Return the journal record of an encoded message. Equals `pack_record` of the message."""
    return _pack(frames)


class _Packer(threading.local):
    """A msgpack packer per thread. Creating its buffer costs more than packing a short message."""

    def __init__(self) -> None:
        self.pack = msgpack.Packer(use_bin_type=True).pack


_packer = _Packer()


def _pack(value: list[Any]) -> bytes:
    """Return values as msgpack. Raises: WireError: one of them cannot be sent."""
    try:
        packed = _packer.pack(value)
    except (ValueError, OverflowError) as error:  # An unpaired surrogate, or an int over 64 bits.
        raise WireError(f"a value that a message cannot contain: {shown(error)}") from error
    assert packed is not None  # `pack` returns None with `autoreset=False` only.
    return packed


def _unpack(packed: bytes, what: str) -> Any:
    """Return the values of msgpack bytes. Raises: WireError."""
    try:
        return msgpack.unpackb(packed, raw=False)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"{what} is not msgpack: {error}") from error


def unpack_record(record: bytes) -> Any:
    """Return the message of `pack_record`. Raises: WireError."""
    frames = _unpack(record, "record")
    if not isinstance(frames, list) or not all(isinstance(frame, bytes) for frame in frames):
        raise WireError("record is not a list of frames")
    return decode(frames, oldest=OLDEST_RECORD)


# --- The fast path of encoding and decoding, compiled once per message type ---------------------


@functools.cache
def _to_map(
    cls: type, version: int = SCHEMA_VERSION
) -> Callable[[Any, list[bytes]], dict[str, Any]]:
    """Return a function that makes a map of a message's fields. msgpack packs enums directly.

    Args:
        version: the map has the fields of this schema version.
    """
    hints, _ = _schema(cls)
    is_newest = version >= SCHEMA_VERSION
    names = tuple(name for name in hints if is_newest or is_in(version, cls.__name__, name))
    get = attrgetter(*names)
    converters = [(name, _to_plain(hints[name], version)) for name in names]
    special = [(name, convert) for name, convert in converters if convert is not None]

    def to_map(message: Any, frames: list[bytes]) -> dict[str, Any]:
        values = get(message)
        plain = dict(zip(names, values if len(names) > 1 else (values,), strict=True))
        for name, convert in special:
            plain[name] = convert(plain[name], frames)
        return plain

    return to_map


def _to_plain(kind: Any, version: int) -> Callable[[Any, list[bytes]], Any] | None:
    """Return a converter from a field's type to a msgpack type, None if msgpack packs it as is."""
    if dataclasses.is_dataclass(kind):
        return _to_map(typing.cast(type, kind), version)
    if kind is np.ndarray:
        return _array_to_frame
    if typing.get_origin(kind) is list:
        convert = _to_plain(typing.get_args(kind)[0], version)
        return convert and (lambda items, frames: [convert(each, frames) for each in items])
    return None


def _array_to_frame(array: np.ndarray, frames: list[bytes]) -> list[Any]:
    """Append an array's bytes to the frames; return its frame number, dtype and shape."""
    name = _DTYPE_NAMES.get(array.dtype)
    if name is None:
        raise WireError(f"array dtype {array.dtype.name} is not one of {ARRAY_DTYPES}")
    frames.append(array.tobytes())  # The bytes are in C order for any memory layout.
    return [len(frames), name, list(array.shape)]


class _NotAsSent(Exception):
    """The fields differ from the exact form that `encode` writes. The full decoder decides."""


@functools.cache
def _as_sent(cls: type) -> Callable[[Any, list[bytes]], Any]:
    """Return the fast decoder of a message type: all fields, in order, with exact types.

    It accepts fewer inputs than `_from_plain` and returns equal messages. `_from_plain` handles
    the rest: it widens ints to floats, fills in defaults and reports errors.
    """
    hints, _ = _schema(cls)
    names = tuple(hints)
    types = tuple(_plain_type(kind) for kind in hints.values())
    converters = [(name, _from_sent(kind)) for name, kind in hints.items()]
    special = [(name, convert) for name, convert in converters if convert is not None]
    bounds = bounds_of(cls).items()
    ranges = [(name, b.low, b.high) for name, b in bounds if isinstance(b, Between)]
    sizes = [(name, b.num) for name, b in bounds if isinstance(b, AtMost)]

    def from_map(fields: Any, frames: list[bytes]) -> Any:
        if type(fields) is not dict or tuple(fields) != names:
            raise _NotAsSent
        if tuple(map(type, fields.values())) != types:
            raise _NotAsSent
        for name, low, high in ranges:
            if not low <= fields[name] <= high:
                raise _NotAsSent
        for name, most in sizes:
            if len(fields[name]) > most:
                raise _NotAsSent
        made = dict(fields)  # A copy: if a converter fails, `_from_plain` reads `fields` again.
        for name, convert in special:
            made[name] = convert(made[name], frames)
        return cls(**made)

    return from_map


def _plain_type(kind: Any) -> type:
    """Return the type of the unpacked msgpack value for a field of type `kind`."""
    origin = typing.get_origin(kind)
    if origin is not None:
        return origin
    if kind is np.ndarray:
        return list
    if dataclasses.is_dataclass(kind):
        return dict
    return str if issubclass(kind, StrEnum) else kind


def _from_sent(kind: Any) -> Callable[[Any, list[bytes]], Any] | None:
    """Return a converter from an unpacked value to its field; None if the value is the field."""
    if dataclasses.is_dataclass(kind):
        return _as_sent(typing.cast(type, kind))
    if kind is np.ndarray:
        return _vector_from_frame
    if typing.get_origin(kind) is list:
        return _list_from_sent(typing.get_args(kind)[0])
    if typing.get_origin(kind) is dict:
        return _map_from_sent(*typing.get_args(kind))
    if issubclass(kind, StrEnum):
        return _enum_from_sent(kind)
    return None


def _list_from_sent(kind: Any) -> Callable[[Any, list[bytes]], Any]:
    """Return the quick decoder of a list of one type."""
    convert, one_type, most = _from_sent(kind), {_plain_type(kind)}, ITEM_CHARS

    def from_list(items: list[Any], frames: list[bytes]) -> list[Any]:
        if not one_type.issuperset(map(type, items)):
            raise _NotAsSent
        if kind is str and items and max(map(len, items)) > most:
            raise _NotAsSent
        return items if convert is None else [convert(each, frames) for each in items]

    return from_list


def _map_from_sent(key_kind: type, kind: type) -> Callable[[Any, list[bytes]], Any]:
    """Return the quick decoder of a map of plain values."""

    def from_map(items: dict[Any, Any], _: list[bytes]) -> dict[Any, Any]:
        is_as_sent = {key_kind}.issuperset(map(type, items))
        if not (is_as_sent and {kind}.issuperset(map(type, items.values()))):
            raise _NotAsSent
        return items

    return from_map


def _enum_from_sent(kind: type[StrEnum]) -> Callable[[Any, list[bytes]], Any]:
    """Return the quick decoder of an enum's value."""
    members = {member.value: member for member in kind}

    def from_text(text: str, _: list[bytes]) -> StrEnum:
        member = members.get(text)
        if member is None:
            raise _NotAsSent
        return member

    return from_text


_DTYPES = {name: np.dtype(name) for name in ARRAY_DTYPES}


def _vector_from_frame(value: list[Any], frames: list[bytes]) -> np.ndarray:
    """Return a one-dimensional array from its frame. Raises: _NotAsSent."""
    if len(value) != 3:
        raise _NotAsSent
    index, name, shape = value
    is_described = type(index) is int and type(name) is str and type(shape) is list
    if not (is_described and len(shape) == 1 and type(shape[0]) is int):
        raise _NotAsSent
    dtype = _DTYPES.get(name)
    if dtype is None or not 1 <= index < len(frames):
        raise _NotAsSent
    frame = bytes(frames[index])
    if not len(frame) == shape[0] * dtype.itemsize <= MAX_FRAME_BYTES:
        raise _NotAsSent
    if name == "bool" and frame.translate(None, b"\0\1"):
        raise _NotAsSent
    return np.frombuffer(frame, dtype)


# --- The full decoder: accepts unusual forms, names errors --------------------------------------


@functools.cache
def _fields(cls: type) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(cls)


@functools.cache
def _schema(cls: type) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the types of the fields by name, and the names of fields without a default."""
    unset = dataclasses.MISSING
    required = (f.name for f in _fields(cls) if f.default is f.default_factory is unset)
    return typing.get_type_hints(cls), frozenset(required)


def _from_plain(kind: Any, value: Any, frames: list[bytes], *, path: str) -> Any:
    """Return a checked value of any type. Raises: WireError, with the path of the value."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _message_from_plain(kind, value, frames, path=path)
    if kind is np.ndarray:
        return _array_from_frame(value, frames, path=path)
    if typing.get_origin(kind) is list:
        if not isinstance(value, list):
            raise WireError(f"{path} is {type(value).__name__}, not a list")
        (item_kind,) = typing.get_args(kind)
        if item_kind in (int, float, str):
            if item_kind is str and any(
                isinstance(each, str) and len(each) > ITEM_CHARS for each in value
            ):
                raise WireError(f"{path}: an entry has more than {ITEM_CHARS} characters")
            return _scalars(item_kind, value, path=path)
        return [
            _from_plain(item_kind, item, frames, path=f"{path}[{i}]")
            for i, item in enumerate(value)
        ]
    if typing.get_origin(kind) is dict:
        if not isinstance(value, dict):
            raise WireError(f"{path} is {type(value).__name__}, not a map")
        key_kind, item_kind = typing.get_args(kind)
        keys = _scalars(key_kind, list(value), path=f"{path} key")
        return dict(zip(keys, _scalars(item_kind, list(value.values()), path=path), strict=True))
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        try:
            return kind(value)
        except ValueError as error:
            known = [member.value for member in kind]
            raise WireError(f"{path} is {shown(value)}, not one of {known}") from error
    return _scalars(kind, [value], path=path)[0]


def _scalars(kind: type, values: list[Any], *, path: str) -> list[Any]:
    """Return the checked values. Ints become floats in a float field. A bool is not an int."""
    allowed = (int, float) if kind is float else (kind,)
    for value in values:
        if type(value) not in allowed:
            name = type(value).__name__
            raise WireError(f"{path} is {name} {shown(value)}, not {kind.__name__}")
    return [float(value) for value in values] if kind is float else values


def _message_from_plain(cls: type, value: Any, frames: list[bytes], *, path: str) -> Any:
    """Return a checked message from its fields. Raises: WireError."""
    if not isinstance(value, dict):
        raise WireError(f"{path} is {type(value).__name__}, not a map of fields")
    hints, required = _schema(cls)
    missing = sorted(required - value.keys())
    unknown = sorted(map(str, value.keys() - hints.keys()))
    if missing or unknown:
        raise WireError(f"{path}: missing fields {missing}, unknown fields {shown(unknown)}")
    bounds = bounds_of(cls)
    made = dict[str, Any]()
    for name in hints:
        if name not in value:
            continue
        made[name] = _from_plain(hints[name], value[name], frames, path=f"{path}.{name}")
        if name in bounds and not bounds[name].allows(made[name]):
            raise WireError(f"{path}.{name} is {shown(value[name])}, not {bounds[name]}")
    return cls(**made)


def _array_from_frame(value: Any, frames: list[bytes], *, path: str) -> np.ndarray:
    """Return a checked array from its frame. Raises: WireError."""
    well_formed = (
        isinstance(value, list)
        and len(value) == 3
        and type(value[0]) is int
        and value[1] in ARRAY_DTYPES
        and isinstance(value[2], list)
        and len(value[2]) <= MAX_AXES
        and all(type(n) is int and 0 <= n <= MAX_AXIS for n in value[2])
    )
    if not well_formed:
        raise WireError(f"{path} is not [frame, dtype, shape]")
    index, dtype, shape = value
    if not 1 <= index < len(frames):
        raise WireError(f"{path} refers to frame {shown(index)} of {len(frames)}")
    frame = bytes(frames[index])
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    if num_bytes > MAX_FRAME_BYTES or len(frame) != num_bytes:
        raise WireError(f"{path}: {len(frame)} bytes for shape {shape} of {dtype}")
    if dtype == "bool" and np.frombuffer(frame, dtype=np.uint8).max(initial=0) > 1:
        raise WireError(f"{path}: a bool must be 0 or 1")
    try:
        return np.frombuffer(frame, dtype=dtype).reshape(shape)
    except ValueError as error:  # The array is empty, and numpy does not support its shape.
        raise WireError(f"{path}: shape {shown(shape)}: {error}") from error
