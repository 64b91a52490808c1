"""The shared memory limit of all connections: SQLite has one limit per process, not per connection.

A statement can run out of memory because statements of other sessions hold it. The statement then
runs once more while no other statement runs. A second failure is an error of the statement.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from envhub.env import EnvFailure

T = TypeVar("T")
WAIT_S = 10.0  # Longest wait for other calls to end.


class SharedMemory:
    """Tracks the running calls, and reserves the memory for a single call."""

    def __init__(self, *, wait_s: float = WAIT_S) -> None:
        self._wait_s = wait_s
        self._changed = threading.Condition()
        self._turn = threading.Lock()  # Held by the call that runs alone.
        self._num_users = 0
        self._is_reserved = False

    def used(self, use: Callable[[], T]) -> T:
        """Return the result of `use`; on MemoryError it is called again, alone.

        `use` must not call this method.

        Raises:
            MemoryError: the memory was too small even for this call alone.
            EnvFailure: other calls took too long to end.
            Exception: any exception of `use`.
        """
        try:
            with self._shared():
                return use()
        except MemoryError:
            # The traceback refers to the fetched rows, so it must be freed before the next call.
            pass
        with self._exclusive():
            return use()

    @contextmanager
    def _shared(self) -> Iterator[None]:
        """Count a call that shares the memory with others."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._is_reserved, self._wait_s):
                raise self._wait_failure()
            self._num_users += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_users -= 1
                self._changed.notify_all()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Wait until no other call runs, and reserve the memory for this one."""
        deadline_s = time.monotonic() + self._wait_s
        if not self._turn.acquire(timeout=self._wait_s):
            raise self._wait_failure()
        try:
            with self._changed:
                self._is_reserved = True
                left_s = deadline_s - time.monotonic()
                if not self._changed.wait_for(lambda: self._num_users == 0, left_s):
                    raise self._wait_failure()
            yield
        finally:
            with self._changed:
                self._is_reserved = False
                self._changed.notify_all()
            self._turn.release()

    def _wait_failure(self) -> EnvFailure:
        """Return the error for memory that other sessions occupy for too long."""
        return EnvFailure(
            f"statements of other sessions occupied the memory for {self._wait_s:g} s"
        )


MEMORY = SharedMemory()
