"""Versions of the wire: the fields of each message by version, and conversions between versions.

A process understands its own schema version and the previous one. It speaks the lower version of
the two peers: an answer has the version of the message that it answers. A peer whose message was
refused speaks the previous version from then on. `schema.json` lists the fields that each version
has added. A field of a later version is left out for an older peer, and the field of an older
peer's message has its default. A field that was renamed, or has another meaning, has a conversion.
"""

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from common.repository import code_name
from common.wire.access.bounds import shown
from common.wire.messages import SCHEMA_VERSION

PREVIOUS_VERSION = SCHEMA_VERSION - 1
OLDEST_RECORD = 3  # Oldest version of the records in journals and logs that can be read.
REFUSAL = "schema version"  # Begin of the reason with which a message is refused for its version.
REJECTED = "Rejected"  # This message has the same form in all versions.
_FIXARRAY, _SMALL = 0x93, 0x80  # msgpack: an array of three values, and the end of small integers.

Convert = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """The difference of a message between two consecutive versions, apart from added fields.

    Both functions receive the map of plain fields by name, as it is packed, and return a new one.
    """

    raised: Convert  # From the older version to the newer one.
    lowered: Convert  # From the newer version to the older one.


# (older version, message) -> conversion between this version and the next one.
Conversions = Mapping[tuple[int, str], Conversion]
CONVERSIONS: Conversions = MappingProxyType({})


@functools.cache
def fields_by_version() -> dict[str, dict[str, int]]:
    """Return the version that added each field, by message."""
    listed = json.loads(Path(__file__).with_name("schema.json").read_text(encoding="utf-8"))
    found: dict[str, dict[str, int]] = {}
    for version, messages in listed.items():
        for name, fields in messages.items():
            found.setdefault(name, {}).update(dict.fromkeys(fields.split(), int(version)))
    return found


def is_in(version: int, message: str, field: str | None = None) -> bool:
    """Return whether a version has a message, or a field of it. An unlisted one is the newest."""
    added = fields_by_version().get(message, {})
    if field is None:
        return min(added.values(), default=SCHEMA_VERSION) <= version
    return added.get(field, SCHEMA_VERSION) <= version


def raised(
    fields: dict[str, Any], message: str, version: int, conversions: Conversions = CONVERSIONS
) -> dict[str, Any]:
    """Return the fields of a message of an older version, converted to the current version."""
    for each in range(version, SCHEMA_VERSION):
        if (each, message) in conversions:
            fields = conversions[each, message].raised(fields)
    return fields


def lowered(
    fields: dict[str, Any], message: str, version: int, conversions: Conversions = CONVERSIONS
) -> dict[str, Any]:
    """Return the fields of a message of the current version, converted to an older version."""
    for each in reversed(range(version, SCHEMA_VERSION)):
        if (each, message) in conversions:
            fields = conversions[each, message].lowered(fields)
    return fields


def refusal(version: object, fields: object) -> str:
    """Return the reason to refuse a message of another version: both versions and commits."""
    sender = cast(dict[str, object], fields).get("commit") if isinstance(fields, dict) else None
    of_sender = f" of {sender[:60]}" if isinstance(sender, str) and sender else ""
    return (
        f"{REFUSAL} {shown(version)}{of_sender}, but {code_name()} understands"
        f" {PREVIOUS_VERSION} and {SCHEMA_VERSION}"
    )


def version_of(frames: list[bytes]) -> int:
    """Return the schema version in the header of a message, 0 if it has none."""
    head = frames[0][:2] if frames else b""
    is_header = len(head) == 2 and head[0] == _FIXARRAY and head[1] < _SMALL
    return head[1] if is_header else 0
