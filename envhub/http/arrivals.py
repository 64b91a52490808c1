"""Requests of one turn of the hub's loop, answered one right after the other."""

import asyncio
from time import monotonic
from typing import Protocol

from envhub.http.known_heads import KnownHeads

MAX_WAIT_S = 0.005  # of an answer for those that are made after it


class Connection(Protocol):
    """What brings requests. Its `take` does what they ask for, in whatever state it is."""

    transport: asyncio.Transport
    is_quick: bool  # its last request was answered at once, and nothing stands against the next
    answered_at: float  # by `KnownHeads`, on the loop's clock

    def take(self, data: bytes) -> None: ...


class Arrivals:
    """What came over the connections of a hub, for as long as the loop is reading from others.

    A processor that has just been in the kernel begins with cold caches, and uvloop calls it for
    every write. So the answers of a turn are made first, one right after the other, and written
    then. What cannot be answered at once is taken after that.
    """

    def __init__(self, known: KnownHeads) -> None:
        self._known = known
        self.come: list[tuple[Connection, bytes]] = []  # the first one calls `wake` before
        self._answers: list[tuple[asyncio.Transport, bytes]] = []
        self._others: list[tuple[Connection, bytes]] = []

    def wake(self) -> None:
        """Have what comes from now on taken when the loop has read all that is there."""
        asyncio.get_running_loop().call_soon(self._take_all)

    def _take_all(self) -> None:
        self._answer_quick()
        self._write_answers()
        self._take_others()
        if self.come:
            self.wake()

    def _answer_quick(self) -> None:
        known, answered_at = self._known, asyncio.get_running_loop().time()
        answer, now_s, write_at_s = known.answer, known.now_s(), monotonic() + MAX_WAIT_S
        waiting, keep = iter(self.come), self._answers.append
        connection: Connection | None = None
        try:
            for connection, data in waiting:
                if connection.is_quick and (response := answer(data, now_s)) is not None:
                    connection.answered_at = answered_at
                    keep((connection.transport, response))
                else:
                    connection.is_quick = False  # what comes behind it has to wait, too
                    self._others.append((connection, data))
                if monotonic() >= write_at_s:
                    break
            connection = None
        finally:
            self.come[:] = waiting
            self._end(connection.transport if connection is not None else None)

    def _write_answers(self) -> None:
        answers = iter(self._answers)
        transport: asyncio.Transport | None = None
        try:
            for transport, response in answers:
                transport.write(response)
            transport = None
        finally:
            self._answers[:] = answers
            self._end(transport)

    def _take_others(self) -> None:
        others = iter(self._others)
        connection: Connection | None = None
        try:
            for connection, data in others:
                connection.take(data)
            connection = None
        finally:
            self._others[:] = others
            self._end(connection.transport if connection is not None else None)

    def _end(self, failed: asyncio.Transport | None) -> None:
        """End a connection that failed, as the loop does, and have the others taken soon."""
        if failed is not None:
            failed.abort()
            self.wake()
