"""Size limits of actions in requests from an actor to a hub, common to both sides.

Sizes are bytes of UTF-8 in the JSON of a request.
"""

MIB = 1 << 20
DEFAULT_ACTION_MIB = 16
MOST_ACTION_MIB = 48  # A frame between a hub and its workers can hold 64 MiB.
# The longest token of common vocabularies has 128 bytes; JSON writes a line break as two bytes.
BYTES_PER_TOKEN = 256
# Maximum size of a step's other fields, such as its session and number.
FIELDS_BYTES = 64 * 1024
# Maximum size of all actions in a request with several. Every hub accepts this size.
TOGETHER_BYTES = 4 * MIB
ESCAPED_BYTES = 6  # Maximum size of one character in JSON: NUL becomes \u0000.


def needed_mib(turn_tokens: int) -> int:
    """Return the size limit in MiB for the largest action of a turn with `turn_tokens` tokens."""
    return -(-turn_tokens * BYTES_PER_TOKEN // MIB)


def most_bytes(text: str) -> int:
    """Return an upper bound of a text's size in JSON, in bytes."""
    return ESCAPED_BYTES * len(text)
