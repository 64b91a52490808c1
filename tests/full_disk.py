"""A disk without room, for a while: what a process writes is refused by the system itself."""

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def no_room_beyond(num_bytes: int) -> Iterator[None]:
    """Let no file of this process grow over a size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
