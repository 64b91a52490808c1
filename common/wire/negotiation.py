"""The schema version between two peers: the lower of their own versions."""

from typing import Any

from common.errors import WireError
from common.repository import code_name
from common.wire.codec import decode, encode
from common.wire.messages import SCHEMA_VERSION, Rejected
from common.wire.versions import PREVIOUS_VERSION, REFUSAL, version_of


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


def in_version(frames: list[bytes], version: int) -> list[bytes]:
    """Return an encoded message in another schema version. Raises: WireError."""
    is_same = version_of(frames) == version
    return frames if is_same else encode(decode(frames), version)
