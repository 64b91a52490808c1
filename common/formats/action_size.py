"""The size of an action on its way from an actor to a hub, on which both sides agree.

Sizes are those of UTF-8, as the JSON of a request carries it.
"""

MIB = 1 << 20
DEFAULT_ACTION_MIB = 16
MOST_ACTION_MIB = 48  # A frame between a hub and its workers holds 64 MiB.
# The longest token of common vocabularies has 128 bytes; JSON writes a line break as two bytes.
BYTES_PER_TOKEN = 256
# Session, number and the other fields of a step beside its action.
FIELDS_BYTES = 64 * 1024
# The actions of one request that carries several. Each hub takes as much.
TOGETHER_BYTES = 4 * MIB
ESCAPED_BYTES = 6  # of one character, at most: JSON writes NUL as \u0000


def needed_mib(turn_tokens: int) -> int:
    """Return the MiB of the largest action that a turn of so many tokens can sample."""
    return -(-turn_tokens * BYTES_PER_TOKEN // MIB)


def most_bytes(text: str) -> int:
    """Return a bound of the bytes that JSON takes for a text."""
    return ESCAPED_BYTES * len(text)
