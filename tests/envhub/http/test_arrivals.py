"""Laws of requests that came in one turn of the loop: each is taken, in its order."""

import asyncio
from typing import Any, cast

from envhub.http.arrivals import Arrivals
from envhub.http.known_heads import KnownHeads


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.is_aborted = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def abort(self) -> None:
        self.is_aborted = True


class Link:
    """A connection that notes what it is to take, and fails at what is bad."""

    answered_at = 0.0

    def __init__(self, *, is_quick: bool) -> None:
        self.wire, self.is_quick = Wire(), is_quick
        self.transport = cast(asyncio.Transport, self.wire)
        self.taken: list[bytes] = []

    def take(self, data: bytes) -> None:
        self.taken.append(data)
        if data == b"bad":
            raise KeyError("a bug")


class Known(KnownHeads):
    """Knows what begins with a k."""

    def answer(self, request: bytes) -> bytes | None:
        return request.upper() if request.startswith(b"k") else None


def taken_in_one_turn(*come: tuple[Link, bytes]) -> list[Any]:
    """Return the failures that the loop was told of."""
    failures: list[Any] = []

    async def turn() -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, told: failures.append(told["exception"])
        )
        arrivals = Arrivals(Known(None, {}))
        arrivals.wake()
        arrivals.come.extend(come)
        await asyncio.sleep(0)
        assert len(arrivals.come) < len(come)
        await asyncio.sleep(0)
        assert arrivals.come == []

    asyncio.run(turn())
    return failures


def test_known_requests_are_answered_and_others_are_taken_in_their_order() -> None:
    quick, slow = Link(is_quick=True), Link(is_quick=False)
    come = [(quick, b"k1"), (slow, b"k2"), (quick, b"other"), (slow, b"x"), (quick, b"k3")]
    assert taken_in_one_turn(*come) == []
    assert (quick.wire.written, quick.taken) == ([b"K1", b"K3"], [b"other"])
    assert (slow.wire.written, slow.taken) == ([], [b"k2", b"x"])
    assert quick.answered_at > 0.0


def test_connection_that_fails_ends_alone_and_the_loop_is_told() -> None:
    fails, waits = Link(is_quick=False), Link(is_quick=True)
    failures = taken_in_one_turn((waits, b"k1"), (fails, b"bad"), (waits, b"k2"), (waits, b"x"))
    assert [type(each) for each in failures] == [KeyError]
    assert (waits.wire.written, waits.taken) == ([b"K1", b"K2"], [b"x"])
    assert (fails.wire.is_aborted, waits.wire.is_aborted) == (True, False)
