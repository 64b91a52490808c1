"""Declarations of configuration keys: default, text and constraint in one place, with checks.

Example:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class TrainSection:
        num_steps: int = knob(100, "optimizer steps", ge=0, must="be >= warmup_steps")

        def contradictions(self) -> Iterator[Contradiction]:
            if ...:
                yield "num_steps", self.num_steps, "must be ..."
"""

import ipaddress
import math
import operator
import re
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import date
from enum import Enum
from typing import Any, cast
from urllib.parse import urlsplit

from common.errors import ConfigError

# Values that only a mapping with values of any type can hold. They have no constraint.
FREE = (list, dict, type(None))
Contradiction = tuple[str, object, str]  # Key below the section, value, required value.
RELATIONS: dict[str, Callable[[Any, Any], bool]] = {  # Relations between the values of two keys.
    "be at most": operator.le,
    "be <": operator.lt,
    "be >=": operator.ge,
    "be >": operator.gt,
    "divide": lambda value, whole: whole % value == 0,
}


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern for texts."""

    phrase: str
    fits: Callable[[str], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """The constraint of a value, or of each element of a list or mapping."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    also: float | str | None = None  # An additional allowed value, such as 0 for "off".
    one_of: tuple[str, ...] = ()
    form: Pattern | None = None

    @property
    def phrase(self) -> str:
        """Return the constraint as text."""
        if self.one_of or self.form:
            words = self.form.phrase if self.form else f"one of {', '.join(self.one_of)}"
            return f"must be {words}" if self.also is None else f'must be {words}, or "{self.also}"'
        low = self.gt if self.ge is None else self.ge
        high = self.lt if self.le is None else self.le
        if low is not None and high is not None:
            words = f"in {'[('[self.ge is None]}{low:g}, {high:g}{'])'[self.le is None]}"
        elif low is not None:
            words = f"{'>' if self.ge is None else '>='} {low:g}"
        else:
            words = "finite" if high is None else f"{'<' if self.le is None else '<='} {high:g}"
        return f"must be {words}" if self.also is None else f"must be {self.also:g} or {words}"

    def allows(self, value: object) -> bool:
        """Return whether a value meets the constraint. NaN and infinities never do."""
        if self.also is not None and value == self.also:
            return True
        if isinstance(value, str):
            is_known = not self.one_of or value in self.one_of
            return (
                is_known
                and len(value) <= MAX_CHARS
                and (self.form is None or bool(self.form.fits(value)))
            )
        if not isinstance(value, (int, float)):
            return False
        return (
            (isinstance(value, int) or math.isfinite(value))  # A large int does not fit in a float.
            and (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )


def _is_host(text: str) -> bool:
    """Return whether a text is an IP address or may be a host name."""
    if re.fullmatch(r"[\d.]+|.*:.*", text):
        try:
            return bool(ipaddress.ip_address(text))
        except ValueError:
            return False
    return bool(re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?", text))


def _is_url(text: str) -> bool:
    """Return whether a text is an address of http or https with a host."""
    try:
        parts = urlsplit(text)
        # `parts.port` raises ValueError for an invalid port.
        is_there = bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    return is_there and parts.scheme in ("http", "https") and not re.search(r"\s", text)


def _is_path(text: str) -> bool:
    """Return whether common file systems accept a text as a path."""
    parts = text.encode(errors="replace").split(b"/")
    is_short = sum(map(len, parts)) + len(parts) <= 4096 and max(map(len, parts)) <= 255
    return _is_name(text) and is_short  # Limits of common file systems.


def _is_name(text: str) -> bool:
    """Return whether a text is printable and not blank."""
    return bool(text.strip()) and text.isprintable()


def _is_file_name(text: str) -> bool:
    """Return whether a text is a plain file name that the product does not use itself."""
    is_plain = text.isprintable() and "/" not in text and text.strip() == text
    is_short = len(text) <= 100 and len(text.encode()) <= 200  # File systems allow 255 bytes.
    return is_plain and is_short and text != "latest" and text[:1] not in ("", ".")


def _is_date(text: str) -> bool:
    """Return whether a text is a date as YYYY-MM-DD."""
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


CEILING = 1e10  # Default upper bound of numbers; a larger number is a typing error.
LONGEST_S = 2e6  # 23 days: many libraries store a wait as 32 bits of milliseconds.
MAX_CHARS = 10_000  # Longest text.
TEXT = Pattern("printable text on one line", str.isprintable)
ANY_TEXT = Pattern("any characters", lambda _: True)  # It may have several lines.
NAME = Pattern("printable text, not empty", _is_name)
PATH = Pattern("a path", _is_path)
WORD = Pattern("a name without spaces", lambda text: _is_name(text) and " " not in text)
PEER_NAME = Pattern(
    "printable text of at most 200 characters", lambda text: text.isprintable() and len(text) <= 200
)
FILE_NAME = Pattern(
    'a plain file name: up to 100 printable characters without "/", not "latest", no "." at the'
    " beginning",
    _is_file_name,
)
HOST = Pattern("an address or a host name", _is_host)
URL = Pattern("http://host... or https://host...", _is_url)
RAY = Pattern("HOST:PORT of a Ray cluster, or auto", re.compile(r"auto|[^\s:/]+:\d{1,5}").fullmatch)
LABEL = Pattern(
    "key=value, key=!value, key=in(a,b) or key=!in(a,b)",
    re.compile(r"[\w./-]+=!?([\w.-]+|in\([\w., -]+\))").fullmatch,
)
DATE = Pattern("a date as YYYY-MM-DD", _is_date)
DEVICE = Pattern(
    "auto, cpu, cuda or cuda:<number>", re.compile(r"auto|cpu|cuda(:\d{1,3})?").fullmatch
)
ENV_NAME = Pattern(
    "an environment's name, MODULE:FUNCTION of your own, a game such as textarena:Sudoku-v0,"
    " mcp:FILE.yaml or verifiers:FILE.yaml",
    re.compile(r"[\w-]+|[^\s:]+:\w+|(textarena|gymnasium|mcp|verifiers):[^\s,]+").fullmatch,
)
SANDBOX = Pattern(
    "bwrap, docker, podman, remote or harbor:PROVIDER",
    re.compile(r"bwrap|docker|podman|remote|harbor:[a-z0-9-]+").fullmatch,
)
FUNCTION = Pattern(
    "a function of your own, as module:function or file.py:function",
    re.compile(r"[^\s:][^:]*:\w+").fullmatch,
)


def knob(
    default: Any,
    text: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    also: float | str | None = None,
    one_of: tuple[str, ...] = (),
    form: Pattern | None = None,
    must: str = "",
) -> Any:
    """Declare one key of a section.

    Args:
        default: value without YAML and overrides; a list is copied.
        text: meaning and unit, for `run.py help KEY`.
        ge, gt, le, lt: bounds of a number, or of each number of a list. A lower bound is required;
            the default upper bound is CEILING.
        also: an additional value that is allowed outside of the bounds, `one_of` and `form`.
        one_of: all allowed texts.
        form: pattern of a text; without `form` and `one_of` any printable line is allowed.
        must: one of RELATIONS and a key of the same section, such as "be at most max_size".
    """
    if ge is not None or gt is not None:
        le = CEILING if le is None and lt is None else le
    elif not one_of:
        form = form or TEXT
    law = Constraint(ge=ge, gt=gt, le=le, lt=lt, also=also, one_of=one_of, form=form)
    metadata = {"text": text, "law": law, "must": must}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: copy(cast(Any, default)), metadata=metadata)
    return field(default=default, metadata=metadata)


def seconds(default: float, text: str, **law: Any) -> Any:
    """Declare a key with a duration; the default upper bound is LONGEST_S."""
    bound: dict[str, Any] = {"le": LONGEST_S}
    return knob(default, text, **(bound | law))


def check(section: Any, prefix: str = "") -> None:
    """Check the constraints and combinations of all values below a config dataclass.

    Raises: ConfigError: "section.key=value: law".
    """
    for key_field in fields(section):
        for key, value in _elements(f"{prefix}{key_field.name}", getattr(section, key_field.name)):
            if is_dataclass(value):
                check(value, f"{key}.")
            elif not isinstance(value, (bool, Enum, *FREE)):
                law: Constraint | None = key_field.metadata.get("law")
                if law is not None and not law.allows(value):
                    raise ConfigError(f"{key}={value!r:.200}: {law.phrase}")
    for key, value, wanted in _contradictions(section, prefix):
        raise ConfigError(f"{prefix}{key}={value!r}: {wanted}")


def _contradictions(section: Any, prefix: str) -> Iterator[Contradiction]:
    """Yield the values of a section that contradict another key."""
    for key_field in fields(section):
        relation, _, other = key_field.metadata.get("must", "").rpartition(" ")
        value = getattr(section, key_field.name)
        bound = getattr(section, other, None)
        if relation and not RELATIONS[relation](value, bound):
            shown = f"{bound:g}" if isinstance(bound, float) else bound
            yield key_field.name, value, f"must {relation} {prefix}{other}={shown}"
    if hasattr(section, "contradictions"):
        yield from section.contradictions()


def _elements(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values under one constraint: the value, or each element of a list or mapping."""
    if isinstance(value, list):
        yield from ((f"{key}[{i}]", each) for i, each in enumerate(cast(list[Any], value)))
    elif isinstance(value, dict):
        below = cast(dict[str, Any], value)
        yield from ((f"{key}.{name}", each) for name, each in below.items())
    else:
        yield key, value
