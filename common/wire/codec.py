"""Encodes messages as ZeroMQ frames: a msgpack header and one raw frame per array. No pickle.

The header is [schema version, type name, {field: value}]. An array field holds
[frame index, dtype, shape]. The decoder checks type and bounds of every field by the annotations
of the dataclass. A damaged or foreign message therefore raises `WireError` here and never later.
`common.wire.versions` has the rules for peers of another schema version.
"""
# An unpacked value has no static type until the decoder has checked it:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import dataclasses
import functools
import math
import typing
from typing import Any

import msgspec
import numpy as np

from common.errors import MessageTooLarge, WireError
from common.segments import without_prefixes
from common.weights import messages as weight_messages
from common.wire import messages
from common.wire.access.bounds import (
    MAX_FRAME_BYTES,
    MAX_FRAMES,
    MAX_HEADER_BYTES,
    MAX_MESSAGE_BYTES,
    shown,
)
from common.wire.messages import SCHEMA_VERSION, EpisodeIdentity, Trajectory
from common.wire.versions import (
    OLDEST_RECORD,
    PREVIOUS_VERSION,
    REJECTED,
    is_in,
    refusal,
    version_of,
)

MAX_AXES = 8
MAX_AXIS = 1 << 28  # Maximum length of one axis of an array.
MAX_REASON_CHARS = 300
ARRAY_DTYPES = ("int32", "float32", "bool", "uint8", "int16")

_DTYPES = {name: np.dtype(name) for name in ARRAY_DTYPES}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

MESSAGE_TYPES: dict[str, type] = {
    name: cls
    for module in (messages, weight_messages)
    for name, cls in vars(module).items()
    if isinstance(cls, type) and dataclasses.is_dataclass(cls) and cls is not EpisodeIdentity
}


def encode(message: Any, version: int = SCHEMA_VERSION) -> list[bytes]:
    """Return the frames of a message: the header, then one frame per array field.

    The bounds of its fields are not checked, see `check_bounds`.

    Args:
        version: schema version that the receiver understands.

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
    if form < SCHEMA_VERSION and isinstance(message, Trajectory):
        message = without_prefixes(message)
    arrays: list[bytes] = []
    fields = message if form >= SCHEMA_VERSION else _fields_of_version(message, form)
    header = _pack([version, name, fields], functools.partial(_array_to_frame, arrays))
    frames = [header, *arrays]
    if reason := _beyond_limits(frames):
        raise MessageTooLarge(f"{name}: {reason}")
    return frames


def in_version(frames: list[bytes], version: int) -> list[bytes]:
    """Return an encoded message in another schema version. Raises: WireError."""
    is_same = version_of(frames) == version
    return frames if is_same else encode(decode(frames), version)


def check_bounds(message: Any) -> None:
    """Check the fields of a message that is not decoded.

    Raises: WireError: a value is out of bounds, so that every receiver would refuse the message.
    """
    cls = type(message)
    fields = {field.name: getattr(message, field.name) for field in dataclasses.fields(cls)}
    _convert(cls, fields, None)


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


def decode(frames: list[bytes], *, oldest: int = PREVIOUS_VERSION) -> Any:
    """Return the message that `encode` turned into these frames.

    Args:
        oldest: oldest schema version that is accepted.

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
    _check_names(cls, fields, path=name)
    return _convert(cls, fields, functools.partial(_array_from_frame, frames))


def pack_record(message: Any) -> bytes:
    """Return one message as a single byte string (journal records)."""
    return pack_frames(encode(message))


def pack_frames(frames: list[bytes]) -> bytes:
    """Return the journal record of an encoded message. Equals `pack_record` of the message."""
    return _pack(frames)


def unpack_record(record: bytes) -> Any:
    """Return the message of `pack_record`. Raises: WireError."""
    frames = _unpack(record, "record")
    if not isinstance(frames, list) or not all(isinstance(frame, bytes) for frame in frames):
        raise WireError("record is not a list of frames")
    return decode(frames, oldest=OLDEST_RECORD)


def _pack(value: Any, enc_hook: Any = None) -> bytes:
    """Return values as msgpack. Raises: WireError: one of them cannot be sent."""
    try:
        return msgspec.msgpack.encode(value, enc_hook=enc_hook)
    except (ValueError, OverflowError) as error:  # An unpaired surrogate, or an int over 64 bits.
        raise WireError(f"a value that a message cannot contain: {shown(error)}") from error


def _unpack(packed: bytes, what: str) -> Any:
    """Return the values of msgpack bytes. Raises: WireError."""
    try:
        return msgspec.msgpack.decode(packed)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise WireError(f"{what} is not msgpack: {shown(str(error))}") from error


def _fields_of_version(value: Any, version: int) -> Any:
    """Return a message as a map of the fields of an older version. Other values are unchanged."""
    if isinstance(value, list):
        return [_fields_of_version(item, version) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    name = type(value).__name__
    return {
        field.name: _fields_of_version(getattr(value, field.name), version)
        for field in dataclasses.fields(value)
        if is_in(version, name, field.name)
    }


def _convert(cls: type, fields: Any, dec_hook: Any) -> Any:
    """Return the message with these fields. Raises: WireError: names the first wrong one."""
    try:
        return msgspec.convert(fields, cls, dec_hook=dec_hook, builtin_types=(bytes,))
    except (msgspec.ValidationError, RecursionError) as error:
        reason, _, place = str(error).rpartition(" - at `$")
        path = cls.__name__ + place.rstrip("`")
        raise WireError(f"{path[:MAX_REASON_CHARS]}: {reason[:MAX_REASON_CHARS]}") from error


def _check_names(cls: type, fields: Any, *, path: str) -> None:
    """Check the names of a message's fields. Raises: WireError: one is missing or unknown."""
    if not isinstance(fields, dict):
        raise WireError(f"{path} is {type(fields).__name__}, not a map of fields")
    names, required, nested = _schema(cls)
    if not required <= fields.keys() <= names:
        missing = sorted(required - fields.keys())
        unknown = sorted(map(str, fields.keys() - names))
        raise WireError(f"{path}: missing fields {missing}, unknown fields {shown(unknown)}")
    for name, kind in nested.items():
        value = fields.get(name, [])
        for item in value if isinstance(value, list) else [value]:
            _check_names(kind, item, path=f"{path}.{name}")


@functools.cache
def _schema(cls: type) -> tuple[frozenset[str], frozenset[str], dict[str, type]]:
    """Return the names of the fields, of those without a default, and of nested messages."""
    fields = dataclasses.fields(cls)
    unset = dataclasses.MISSING
    required = {f.name for f in fields if f.default is f.default_factory is unset}
    nested = {
        name: kind
        for name, hint in typing.get_type_hints(cls).items()
        for kind in (hint, *typing.get_args(hint))
        if isinstance(kind, type) and dataclasses.is_dataclass(kind)
    }
    return frozenset(field.name for field in fields), frozenset(required), nested


def _array_to_frame(arrays: list[bytes], value: Any) -> Any:
    """Append an array's bytes; return its frame number, dtype and shape."""
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} cannot be sent")
    name = _DTYPE_NAMES.get(value.dtype)
    if name is None:
        raise WireError(f"array dtype {value.dtype.name} is not one of {ARRAY_DTYPES}")
    arrays.append(value.tobytes())  # The bytes are in C order for any memory layout.
    return [len(arrays), name, list(value.shape)]


def _array_from_frame(frames: list[bytes], _: type, value: Any) -> np.ndarray:
    """Return a checked array from its frame. Raises: ValueError."""
    is_described = (
        isinstance(value, list)
        and len(value) == 3
        and type(value[0]) is int
        and isinstance(value[1], str)
        and value[1] in _DTYPES
        and isinstance(value[2], list)
        and len(value[2]) <= MAX_AXES
        and all(type(size) is int and 0 <= size <= MAX_AXIS for size in value[2])
    )
    if not is_described:
        raise ValueError("not [frame, dtype, shape]")
    index, name, shape = value
    dtype = _DTYPES[name]
    if not 1 <= index < len(frames):
        raise ValueError(f"refers to frame {shown(index)} of {len(frames)}")
    frame = bytes(frames[index])
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes > MAX_FRAME_BYTES or len(frame) != num_bytes:
        raise ValueError(f"{len(frame)} bytes for shape {shape} of {name}")
    if name == "bool" and frame.translate(None, b"\0\1"):
        raise ValueError("a bool must be 0 or 1")
    return np.frombuffer(frame, dtype).reshape(shape)
