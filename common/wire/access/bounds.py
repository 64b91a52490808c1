"""Bounds of the fields of messages: annotated on a field's type and checked by the decoder.

A field without an annotation has the default bounds of its type. The receiver refuses the whole
message if one value is out of bounds, so each sender must respect the bounds.
"""

import functools
import reprlib
import typing
from dataclasses import dataclass
from typing import Annotated, Any

MAX_COUNT = 2**53  # Maximum of a count: a float represents all integers up to here exactly.

# Limits of a message, equal for its sender, its receiver and the journal. The receiving socket
# would disconnect a larger message, so its sender refuses it. Eight million tokens fit.
MAX_FRAMES = 64  # The header, and one frame for each array.
MAX_HEADER_BYTES = 16 << 20
MAX_FRAME_BYTES = 32 << 20  # Size of the header or of one array.
MAX_MESSAGE_BYTES = 192 << 20  # Total size of all frames of a message.
CURVE_BYTES = 64  # Upper bound of the bytes that encryption adds to a frame.


@dataclass(frozen=True, slots=True)
class Between:
    """Bound of a number. NaN is always out of bounds."""

    low: float
    high: float

    def allows(self, value: Any) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return f"in [{self.low:g}, {self.high:g}]"


@dataclass(frozen=True, slots=True)
class AtMost:
    """Maximum length of a text, bytes, a list or a map: in characters, bytes or entries."""

    num: int

    def allows(self, value: Any) -> bool:
        return len(value) <= self.num

    def __str__(self) -> str:
        return f"of at most {self.num}"


Bound = Between | AtMost

ID_CHARS = 300
Id = Annotated[str, AtMost(ID_CHARS)]  # A name that the product or an environment assigns.
LongText = Annotated[str, AtMost(4_000_000)]
Names = Annotated[list[str], AtMost(1024)]
Count = Annotated[int, Between(0, MAX_COUNT)]
Version = Annotated[int, Between(-1, 10**9)]  # -1: none, or unknown.
Seconds = Annotated[float, Between(0.0, 1e9)]
Rate = Annotated[float, Between(0.0, 1e15)]  # A count per second.

ITEM_CHARS = 1_000  # Maximum length of each text in a list.
_BY_TYPE: dict[type, Bound] = {
    int: Between(-(2**63), 2**63 - 1),
    float: Between(-1e300, 1e300),
    str: AtMost(1_000_000),
    bytes: AtMost(1 << 22),
    list: AtMost(200_000),
    dict: AtMost(10_000),
}

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80
_SHORT.maxlevel = 2


def shown(value: Any) -> str:
    """Return a short text in one line for a received value, for log and error messages."""
    return _SHORT.repr(value)


@functools.cache
def bounds_of(cls: type) -> dict[str, Bound]:
    """Return the bounds of a message's fields, by name. Array and message fields have none."""
    found: dict[str, Bound] = {}
    for name, kind in typing.get_type_hints(cls, include_extras=True).items():
        marks = getattr(kind, "__metadata__", ())
        plain = typing.get_args(kind)[0] if marks else kind
        by_type = _BY_TYPE.get(typing.get_origin(plain) or plain)
        if bound := next((each for each in marks if isinstance(each, Bound)), by_type):
            found[name] = bound
    return found
