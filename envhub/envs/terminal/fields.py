"""Tables of fields: each field of a task's files is obeyed, is a description, or is refused."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from common.errors import ConfigError

MIB_OF = {"B": 1 / (1 << 20), "K": 1 / 1024, "M": 1, "G": 1024}


class Use(StrEnum):
    """The use of a field. REFUSED: only a value that means nothing is accepted."""

    OBEYED = "obeyed"
    DESCRIPTION = "description"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """The use of a field of a task's settings.

    Attributes:
        accepted: values of a refused field that change nothing.
        reason: why other values are refused.
    """

    use: Use
    accepted: tuple[Any, ...] = (None, [], {}, "")
    reason: str = ""


OBEYED = Field(use=Use.OBEYED)
DESCRIPTION = Field(use=Use.DESCRIPTION)


def refused(reason: str, *accepted: Any) -> Field:
    return Field(use=Use.REFUSED, accepted=(None, [], {}, "", *accepted), reason=reason)


def check_fields(
    settings: Mapping[str, Any], fields: Mapping[str, Field], file: str, above: str = ""
) -> None:
    """Raise ConfigError for a field that is unknown, or whose value is refused."""
    for key, value in settings.items():
        name = f"{above}{key}"
        rule = fields.get(name)
        if rule is None:
            below = [other for other in fields if other.startswith(f"{name}.")]
            if not below:
                raise ConfigError(
                    f"{file}: the field {name} is unknown or not supported; remove it"
                )
            if value is None:
                continue
            if not isinstance(value, Mapping):
                raise ConfigError(f"{file}: {name} must be a table")
            check_fields(value, fields, file, f"{name}.")
        elif rule.use is Use.REFUSED and not _is_one_of(value, rule.accepted):
            raise ConfigError(f"{file}: {name}={value!r:.60} is not supported: {rule.reason}")


def _is_one_of(value: Any, accepted: tuple[Any, ...]) -> bool:
    """Return whether a value equals one of the same type; 0 is not false."""
    text = value.lower() if isinstance(value, str) else value
    return any(type(text) is type(other) and text == other for other in accepted)


def size_mib(value: Any, name: str) -> float:
    """Return a size such as "2G", "512mb" or a number of bytes, in MiB. Raises: ConfigError."""
    text = str(value).strip().upper()
    match = re.fullmatch(r"([\d.]+)\s*([BKMG]?)I?B?", text)
    if match is None or isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} is not a size such as 2G")
    return float(match[1]) * MIB_OF[match[2] or "B"]
