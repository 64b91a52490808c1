"""Messages between the hub and its workers: JSON objects, each preceded by its length."""

import asyncio
import json
import struct
from typing import Any

MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct(">I")


def encode_frame(message: dict[str, Any]) -> bytes:
    """Return the bytes of one message.

    Raises: ValueError: longer than MAX_FRAME_BYTES, or not serializable as JSON.
    """
    try:
        # Lone surrogates are encoded unchanged; the hub repairs them in observations.
        body = json.dumps(message, ensure_ascii=False).encode(errors="surrogatepass")
    except TypeError as error:
        raise ValueError(f"a message is not JSON: {error}") from error
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a message has {len(body)} bytes; the maximum is {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Return the next message.

    Raises:
        asyncio.IncompleteReadError, ConnectionError: the peer closed the connection.
        ValueError: not a valid message.
    """
    (num_bytes,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if num_bytes > MAX_FRAME_BYTES:
        raise ValueError(f"a message has {num_bytes} bytes; the maximum is {MAX_FRAME_BYTES}")
    return json.loads(await reader.readexactly(num_bytes))
