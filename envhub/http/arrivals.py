"""Batches the requests that arrive in one turn of the hub's event loop."""

import asyncio
from time import monotonic
from typing import Protocol

from envhub.http.known_heads import HeaderCache

MAX_WAIT_S = 0.005  # Maximum delay of an answer by the computation of later answers.


class HttpConnection(Protocol):
    """A connection that receives requests. Its `take` processes data in any state."""

    transport: asyncio.Transport
    is_quick: bool  # The last request was answered synchronously, and the next one can be as well.
    answered_at: float  # Time of the last answer by `HeaderCache`, on the loop's clock.

    def take(self, data: bytes) -> None: ...


class Arrivals:
    """Data received from a hub's connections while the event loop reads from further ones.

    uvloop enters the kernel for every write, and the processor's caches are cold afterwards.
    Therefore all answers of a turn are computed first and written afterwards. Requests that need
    the application are processed last.
    """

    def __init__(self, known: HeaderCache) -> None:
        self._known = known
        # Received data; before the first entry is added, its connection calls `wake`.
        self.come: list[tuple[HttpConnection, bytes]] = []
        self._answers: list[tuple[asyncio.Transport, bytes]] = []
        self._others: list[tuple[HttpConnection, bytes]] = []

    def wake(self) -> None:
        """Schedule the processing of received data after the loop's current read phase."""
        asyncio.get_running_loop().call_soon(self._take_all)

    def _take_all(self) -> None:
        self._answer_quick()
        self._write_answers()
        self._take_others()
        if self.come:
            self.wake()

    def _answer_quick(self) -> None:
        known = self._known
        answered_at = asyncio.get_running_loop().time()
        answer = known.answer
        now_s = known.now_s()
        write_at_s = monotonic() + MAX_WAIT_S
        waiting = iter(self.come)
        keep = self._answers.append
        connection: HttpConnection | None = None
        try:
            for connection, data in waiting:
                if connection.is_quick and (response := answer(data, now_s)) is not None:
                    connection.answered_at = answered_at
                    keep((connection.transport, response))
                else:
                    connection.is_quick = False  # Later data of this connection must wait as well.
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
        connection: HttpConnection | None = None
        try:
            for connection, data in others:
                connection.take(data)
            connection = None
        finally:
            self._others[:] = others
            self._end(connection.transport if connection is not None else None)

    def _end(self, failed: asyncio.Transport | None) -> None:
        """Abort a connection that raised, as the loop does, and schedule the remaining data."""
        if failed is not None:
            failed.abort()
            self.wake()
