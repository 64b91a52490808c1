"""Upper bounds of seconds: exact in `make test-long`, generous where other tests use the cores."""

import os

IS_EXACT = os.environ.get("EXACT_TIMES") == "1"
GENEROUS_FACTOR = 4.0


def at_most(seconds: float) -> float:
    """Return the bound of a measured time: the seconds, or a multiple of them beside other load."""
    return seconds if IS_EXACT else GENEROUS_FACTOR * seconds
