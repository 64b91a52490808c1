"""The memory of all connections of the process: SQLite bounds it together, not for each one.

Who finds none left may be innocent: another session's statement holds it. So they try once more
while nobody else uses any; what is lacking then, they lack by themselves.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class SharedMemory:
    """Who uses it, and whether one must be alone with it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._turn = threading.Lock()  # of who must be alone
        self._num_users = 0
        self._is_reserved = False

    def used(self, use: Callable[[], T]) -> T:
        """Return what `use` returns; it is called again, alone, if it raises MemoryError.

        Raises: MemoryError: also alone there was too little; and whatever `use` raises.
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
            self._changed.wait_for(lambda: not self._is_reserved)
            self._num_users += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_users -= 1
                self._changed.notify_all()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with self._turn:
            with self._changed:
                self._is_reserved = True
                self._changed.wait_for(lambda: self._num_users == 0)
            try:
                yield
            finally:
                with self._changed:
                    self._is_reserved = False
                    self._changed.notify_all()


MEMORY = SharedMemory()
