"""Giving memory back: glibc keeps what was freed, and blocks of changing shapes scatter it."""

import ctypes


def trim_heap() -> bool:
    """Return freed heap pages to the system; False where the C library has no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return False
    trim(0)
    return True
