"""Bounds of what a message may hold: told beside a field's type, checked wherever one is decoded.

A field without one has the bounds of its type. Whoever writes a field keeps them: a value beyond
them is refused by the receiver, whole.
"""

import functools
import reprlib
import typing
from dataclasses import dataclass
from typing import Annotated, Any

MAX_COUNT = 2**53  # of anything, and the largest number that a float holds exactly

# Limits of a message, the same for its sender, its receiver and the journal. A larger one would
# end the connection unread, so its sender refuses it. An episode of eight million tokens fits.
MAX_FRAMES = 64  # the header, and one frame for each array
MAX_HEADER_BYTES = 16 << 20
MAX_FRAME_BYTES = 32 << 20  # the header or one array
MAX_MESSAGE_BYTES = 192 << 20  # all frames of a message
CURVE_BYTES = 64  # What encryption adds to a frame is below this.


@dataclass(frozen=True, slots=True)
class Between:
    """Of a number: NaN lies nowhere."""

    low: float
    high: float

    def allows(self, value: Any) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return f"in [{self.low:g}, {self.high:g}]"


@dataclass(frozen=True, slots=True)
class AtMost:
    """Of a text, bytes, a list or a map: characters, bytes or entries."""

    num: int

    def allows(self, value: Any) -> bool:
        return len(value) <= self.num

    def __str__(self) -> str:
        return f"of at most {self.num}"


Bound = Between | AtMost

ID_CHARS = 300
Id = Annotated[str, AtMost(ID_CHARS)]  # what the product or an environment names
LongText = Annotated[str, AtMost(4_000_000)]
Names = Annotated[list[str], AtMost(1024)]
Count = Annotated[int, Between(0, MAX_COUNT)]
Version = Annotated[int, Between(-1, 10**9)]  # -1: none, or not known
Seconds = Annotated[float, Between(0.0, 1e9)]
Rate = Annotated[float, Between(0.0, 1e15)]  # of anything, per second

ITEM_CHARS = 1_000  # of each text in a list
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
    """Return what a log says of a value that somebody sent: never much, and on one line."""
    return _SHORT.repr(value)


@functools.cache
def bounds_of(cls: type) -> dict[str, Bound]:
    """Return what the fields of a message must keep, by name; arrays and messages keep nothing."""
    found: dict[str, Bound] = {}
    for name, kind in typing.get_type_hints(cls, include_extras=True).items():
        told = getattr(kind, "__metadata__", ())
        plain = typing.get_args(kind)[0] if told else kind
        by_type = _BY_TYPE.get(typing.get_origin(plain) or plain)
        if bound := next((each for each in told if isinstance(each, Bound)), by_type):
            found[name] = bound
    return found
