"""Versions of the wire: the fields of each message by version, and the version between two peers.

A process understands its own schema version and the previous one. It speaks the lower version of
the two peers: an answer has the version of the message that it answers. A peer whose message was
refused speaks the previous version from then on. `schema.json` lists the fields that each version
has added. A field of a later version is left out for an older peer, and the field of an older
peer's message has its default. So a later version may add messages, and fields with a default; it
renames none.
"""

import functools
import json
from pathlib import Path
from typing import Any, cast

from common.errors import WireError
from common.repository import code_name
from common.wire.access.bounds import shown
from common.wire.messages import SCHEMA_VERSION, Rejected

PREVIOUS_VERSION = SCHEMA_VERSION - 1
OLDEST_RECORD = 3  # Oldest version of the records in journals and logs that can be read.
REFUSAL = "schema version"  # Begin of the reason with which a message is refused for its version.
REJECTED = "Rejected"  # This message has the same form in all versions.
_FIXARRAY, _SMALL = 0x93, 0x80  # msgpack: an array of three values, and the end of small integers.


@functools.cache
def fields_by_version() -> dict[str, dict[str, int]]:
    """Return the version that added each field, by message."""
    listed = json.loads(Path(__file__).with_name("schema.json").read_text(encoding="utf-8"))
    added: dict[str, dict[str, int]] = {}
    for version, messages in listed.items():
        for name, fields in messages.items():
            added.setdefault(name, {}).update(dict.fromkeys(fields.split(), int(version)))
    return added


def is_in(version: int, message: str, field: str | None = None) -> bool:
    """Return whether a version has a message, or a field of it. An unlisted one is the newest."""
    added = fields_by_version().get(message, {})
    if field is None:
        return min(added.values(), default=SCHEMA_VERSION) <= version
    return added.get(field, SCHEMA_VERSION) <= version


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


def accepted_version(message: Any, frames: list[bytes], *, current: int) -> int:
    """Return the version in which to send to a peer after its message.

    It is `current`, or the previous version if the peer has refused `current` and uses that one.

    Args:
        frames: the frames of the message.

    Raises: WireError: the peer refused `current` and is too old or too new; names both commits.
    """
    if not (isinstance(message, Rejected) and message.reason.startswith(REFUSAL)):
        return current
    version = version_of(frames)
    if PREVIOUS_VERSION <= version < current:
        return version
    raise WireError(
        f"{message.reason}; this process is {code_name()} and understands {PREVIOUS_VERSION} and"
        f" {SCHEMA_VERSION}. Upgrade by one schema version at a time"
    )
