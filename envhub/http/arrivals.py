"""Requests of one turn of the hub's loop, answered one right after the other."""

import asyncio
from typing import Protocol

from envhub.http.known_heads import KnownHeads


class Connection(Protocol):
    """What brings requests. Its `take` does what they ask for, in whatever state it is."""

    transport: asyncio.Transport
    is_quick: bool  # its last request was answered at once, and nothing stands against the next
    answered_at: float  # by `KnownHeads`, on the loop's clock

    def take(self, data: bytes) -> None: ...


class Arrivals:
    """What came over the connections of a hub, for as long as the loop is reading from others.

    A processor that has just been in the kernel begins with cold caches. An answer that is made
    after another one, and not after a read, takes two thirds of the time; it leaves no later, since
    the loop writes once it has read from all.
    """

    def __init__(self, known: KnownHeads) -> None:
        self._known = known
        self.come: list[tuple[Connection, bytes]] = []  # the first one calls `wake` before

    def wake(self) -> None:
        """Have what comes from now on taken when the loop has read all that is there."""
        asyncio.get_running_loop().call_soon(self._take_all)

    def _take_all(self) -> None:
        answer, now_s = self._known.answer, asyncio.get_running_loop().time()
        waiting = iter(self.come)
        connection: Connection | None = None
        try:
            for connection, data in waiting:
                if connection.is_quick and (response := answer(data)) is not None:
                    connection.transport.write(response)
                    connection.answered_at = now_s
                else:
                    connection.take(data)
            connection = None
        finally:
            if connection is not None:  # it failed; the loop ends one that fails by itself, too
                connection.transport.abort()
            self.come[:] = waiting
            if self.come:
                self.wake()
