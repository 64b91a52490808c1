"""The number of tokens that the clocks have sampled, in a file that other processes read."""

import struct
from pathlib import Path

COUNTER = "tokens"  # File with one number, 8 bytes.


def read_tokens(folder: Path) -> int:
    """Return the number of tokens that all clocks have sampled."""
    path = folder / COUNTER
    return struct.unpack("q", path.read_bytes())[0] if path.exists() else 0
