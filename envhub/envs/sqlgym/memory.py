"""The memory of all connections of the process: SQLite bounds it together, not for each one.

Who finds none left may be innocent: another session's statement holds it. So they try once more
while nobody else uses any; what is lacking then, they lack by themselves.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from envhub.env import EnvFailure

T = TypeVar("T")
WAIT_S = 10.0  # for others, each time at most


class SharedMemory:
    """Who uses it, and whether one must be alone with it."""

    def __init__(self, *, wait_s: float = WAIT_S) -> None:
        self._wait_s = wait_s
        self._changed = threading.Condition()
        self._turn = threading.Lock()  # of who must be alone
        self._num_users = 0
        self._is_reserved = False

    def used(self, use: Callable[[], T]) -> T:
        """Return what `use` returns; it is called again, alone, if it raises MemoryError.

        No `use` may itself call this.

        Raises:
            MemoryError: also alone there was too little.
            EnvFailure: others' calls took too long to end.
            Exception: whatever `use` raises.
        """
        try:
            with self._beside_others():
                return use()
        except MemoryError:
            pass  # its traceback holds what was fetched: it must go before the next call
        with self._alone():
            return use()

    @contextmanager
    def _beside_others(self) -> Iterator[None]:
        with self._changed:
            if not self._changed.wait_for(lambda: not self._is_reserved, self._wait_s):
                raise self._too_long()
            self._num_users += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_users -= 1
                self._changed.notify_all()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        deadline_s = time.monotonic() + self._wait_s
        if not self._turn.acquire(timeout=self._wait_s):
            raise self._too_long()
        try:
            with self._changed:
                self._is_reserved = True
                left_s = deadline_s - time.monotonic()
                if not self._changed.wait_for(lambda: self._num_users == 0, left_s):
                    raise self._too_long()
            yield
        finally:
            with self._changed:
                self._is_reserved = False
                self._changed.notify_all()
            self._turn.release()

    def _too_long(self) -> EnvFailure:
        return EnvFailure(
            f"statements of other sessions have held the memory for {self._wait_s:g} s"
        )


MEMORY = SharedMemory()
