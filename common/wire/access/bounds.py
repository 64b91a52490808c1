"""Bounds of the fields of messages: annotations of a field's type that the decoder checks.

Every field of a message has one, except bools, enums, arrays and nested messages. The receiver
refuses the whole message if one value is out of bounds, so each sender must respect the bounds.
"""

import reprlib
from typing import Annotated, Any, TypeVar

from msgspec import Meta

MAX_COUNT = 2**53  # Maximum of a count: a float represents all integers up to here exactly.

# Limits of a message, equal for its sender, its receiver and the journal. The receiving socket
# would disconnect a larger message, so its sender refuses it. Eight million tokens fit.
MAX_FRAMES = 64  # The header, and one frame for each array.
MAX_HEADER_BYTES = 16 << 20
MAX_FRAME_BYTES = 32 << 20  # Size of the header or of one array.
MAX_MESSAGE_BYTES = 192 << 20  # Total size of all frames of a message.
CURVE_BYTES = 64  # Upper bound of the bytes that encryption adds to a frame.

ID_CHARS = 300
Value = TypeVar("Value")

Id = Annotated[str, Meta(max_length=ID_CHARS)]  # A name that the product or an environment assigns.
Text = Annotated[str, Meta(max_length=1_000_000)]
LongText = Annotated[str, Meta(max_length=4_000_000)]
Content = Annotated[bytes, Meta(max_length=1 << 22)]
Integer = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Version = Annotated[int, Meta(ge=-1, le=10**9)]  # -1: none, or unknown.
# NaN is out of the bounds of every number.
Number = Annotated[float, Meta(ge=-1e300, le=1e300)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
Rate = Annotated[float, Meta(ge=0.0, le=1e15)]  # A count per second.

ShortText = Annotated[str, Meta(max_length=1_000)]
Entries = Annotated[list[Value], Meta(max_length=200_000)]
Texts = Entries[ShortText]
Names = Annotated[list[ShortText], Meta(max_length=1_024)]
Named = Annotated[dict[str, Value], Meta(max_length=10_000)]

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80
_SHORT.maxlevel = 2


def shown(value: Any) -> str:
    """Return a short text in one line for a received value, for log and error messages."""
    return _SHORT.repr(value)
