"""Messages <-> ZeroMQ frames: a msgpack header and one raw frame per array. No pickle.

The header is [schema version, type name, {field: value}]; an array field holds
[frame index, dtype, shape]. Decoding checks every field's type against the dataclass, so that a
damaged or foreign message raises `WireError` here and nowhere later.
"""
# msgpack has no type stubs, and what it unpacks is of no known type until it is checked here:
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

import dataclasses
import functools
import math
import typing
from enum import StrEnum
from typing import Any

import msgpack
import numpy as np

from common.errors import WireError
from common.wire import messages, weight_messages
from common.wire.messages import SCHEMA_VERSION, EpisodeIdentity

MAX_HEADER_BYTES = 16 * 1024 * 1024
MAX_ARRAY_BYTES = 256 * 1024 * 1024
ARRAY_DTYPES = ("int32", "float32", "bool")

MESSAGE_TYPES: dict[str, type] = {
    name: cls
    for name, cls in [*vars(messages).items(), *vars(weight_messages).items()]
    if isinstance(cls, type) and dataclasses.is_dataclass(cls) and cls is not EpisodeIdentity
}


def encode(message: Any) -> list[bytes]:
    """Return the frames of a message: the header, then one frame per array field.

    Raises: WireError: the object is no message, or an array has a foreign dtype.
    """
    name = type(message).__name__
    if MESSAGE_TYPES.get(name) is not type(message):
        raise WireError(f"{name} is not a message")
    frames: list[bytes] = []
    header = [SCHEMA_VERSION, name, _to_plain(message, frames)]
    return [_pack(header), *frames]


def decode(frames: list[bytes]) -> Any:
    """Return the message that `encode` made these frames of.

    Raises:
        WireError: not msgpack, another schema version, an unknown type, a field that is unknown,
            or missing and without a default, a value of the wrong type, or an array that does not
            match its frame.
    """
    if not frames or len(frames[0]) > MAX_HEADER_BYTES:
        raise WireError("no header, or a header over the size limit")
    header = _unpack(frames[0], "header")
    if not isinstance(header, list) or len(header) != 3:
        raise WireError("header is not [schema, type, fields]")
    schema, name, fields = header
    if type(schema) is not int or schema != SCHEMA_VERSION:
        raise WireError(f"schema version {schema!r}, this side speaks {SCHEMA_VERSION}")
    cls = MESSAGE_TYPES.get(name) if isinstance(name, str) else None
    if cls is None:
        raise WireError(f"unknown message type {name!r}")
    return _from_plain(cls, fields, frames, path=name)


def pack_record(message: Any) -> bytes:
    """Return one message as a single byte string (journal records)."""
    return _pack([bytes(frame) for frame in encode(message)])


def _pack(value: list[Any]) -> bytes:
    packed = msgpack.packb(value, use_bin_type=True)
    assert packed is not None  # only with `autoreset=False`
    return packed


def _unpack(packed: bytes, what: str) -> Any:
    try:
        return msgpack.unpackb(packed, raw=False)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"{what} is not msgpack: {error}") from error


def unpack_record(record: bytes) -> Any:
    """Return the message of `pack_record`. Raises: WireError."""
    frames = _unpack(record, "record")
    if not isinstance(frames, list) or not all(isinstance(frame, bytes) for frame in frames):
        raise WireError("record is not a list of frames")
    return decode(frames)


def _to_plain(value: Any, frames: list[bytes]) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: _to_plain(getattr(value, f.name), frames) for f in _fields(type(value))}
    if isinstance(value, np.ndarray):
        if value.dtype.name not in ARRAY_DTYPES:
            raise WireError(f"array dtype {value.dtype.name} is not one of {ARRAY_DTYPES}")
        frames.append(np.ascontiguousarray(value).tobytes())
        return [len(frames), value.dtype.name, list(value.shape)]
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, list):
        return [_to_plain(item, frames) for item in value]
    return value


@functools.cache
def _fields(cls: type) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(cls)


@functools.cache
def _schema(cls: type) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the fields with their types, and those that have no default."""
    unset = dataclasses.MISSING
    required = (f.name for f in _fields(cls) if f.default is f.default_factory is unset)
    return typing.get_type_hints(cls), frozenset(required)


def _from_plain(kind: Any, value: Any, frames: list[bytes], *, path: str) -> Any:
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _message_from_plain(kind, value, frames, path=path)
    if kind is np.ndarray:
        return _array_from_frame(value, frames, path=path)
    if typing.get_origin(kind) is list:
        if not isinstance(value, list):
            raise WireError(f"{path} is {type(value).__name__}, not a list")
        (item_kind,) = typing.get_args(kind)
        if item_kind in (int, float, str):
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
            raise WireError(f"{path} is {value!r}, not one of {[m.value for m in kind]}") from error
    return _scalars(kind, [value], path=path)[0]


def _scalars(kind: type, values: list[Any], *, path: str) -> list[Any]:
    """Return the values, ints widened where floats are asked for. bool is never an int here."""
    allowed = (int, float) if kind is float else (kind,)
    for value in values:
        if type(value) not in allowed:
            raise WireError(f"{path} is {type(value).__name__} {value!r:.80}, not {kind.__name__}")
    return [float(value) for value in values] if kind is float else values


def _message_from_plain(cls: type, value: Any, frames: list[bytes], *, path: str) -> Any:
    if not isinstance(value, dict):
        raise WireError(f"{path} is {type(value).__name__}, not a map of fields")
    hints, required = _schema(cls)
    missing = sorted(required - value.keys())
    unknown = sorted(map(str, value.keys() - hints.keys()))
    if missing or unknown:
        raise WireError(f"{path}: missing fields {missing}, unknown fields {unknown}")
    return cls(
        **{
            name: _from_plain(hints[name], value[name], frames, path=f"{path}.{name}")
            for name in hints
            if name in value
        }
    )


def _array_from_frame(value: Any, frames: list[bytes], *, path: str) -> np.ndarray:
    well_formed = (
        isinstance(value, list)
        and len(value) == 3
        and type(value[0]) is int
        and value[1] in ARRAY_DTYPES
        and isinstance(value[2], list)
        and all(type(n) is int and n >= 0 for n in value[2])
    )
    if not well_formed:
        raise WireError(f"{path} is not [frame, dtype, shape]")
    index, dtype, shape = value
    if not 1 <= index < len(frames):
        raise WireError(f"{path} points at frame {index} of {len(frames)}")
    frame = bytes(frames[index])
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    if num_bytes > MAX_ARRAY_BYTES or len(frame) != num_bytes:
        raise WireError(f"{path}: {len(frame)} bytes for shape {shape} of {dtype}")
    if dtype == "bool" and np.frombuffer(frame, dtype=np.uint8).max(initial=0) > 1:
        raise WireError(f"{path}: a bool that is neither 0 nor 1")
    try:
        return np.frombuffer(frame, dtype=dtype).reshape(shape)
    except ValueError as error:  # no elements, but more or longer axes than numpy has
        raise WireError(f"{path}: shape {shape!r:.80}: {error}") from error
