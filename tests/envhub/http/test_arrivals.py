"""Laws of requests that came in one turn of the loop: each is taken, in its order."""

import asyncio
import time
from typing import Any, cast

import pytest

from envhub.http import arrivals
from envhub.http.arrivals import Arrivals
from envhub.http.known_heads import HeaderCache


class Wire:
    """A transport that records the written bytes."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.is_aborted = self.is_closed = False

    def write(self, data: bytes) -> None:
        if self.is_closed:
            raise RuntimeError("the handle is closed")
        self.written.append(data)

    def abort(self) -> None:
        self.is_aborted = True


class Link:
    """A connection that records its requests and fails on bad ones."""

    answered_at = 0.0

    def __init__(self, *, is_quick: bool) -> None:
        self.wire, self.is_quick = Wire(), is_quick
        self.transport = cast(asyncio.Transport, self.wire)
        self.taken: list[bytes] = []

    def take(self, data: bytes) -> None:
        self.taken.append(data)
        if data == b"bad":
            raise KeyError("a bug")


class Known(HeaderCache):
    """Treats requests that begin with a k as known."""

    def answer(self, request: bytes, now_s: float) -> bytes | None:
        return request.upper() if request.startswith(b"k") else None


def taken_in_one_turn(*come: tuple[Link, bytes], known: HeaderCache | None = None) -> list[Any]:
    """Return the failures that reached the event loop."""
    failures: list[Any] = []

    async def turn() -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, told: failures.append(told["exception"])
        )
        taking = Arrivals(known or Known(None, {}, now_s=time.monotonic))
        taking.wake()
        taking.come.extend(come)
        await asyncio.sleep(0)
        assert len(taking.come) < len(come)
        for _ in come[1:]:
            await asyncio.sleep(0)
        assert taking.come == []

    asyncio.run(turn())
    return failures


def test_known_requests_are_answered_and_the_rest_queue_in_order() -> None:
    quick, slow = Link(is_quick=True), Link(is_quick=False)
    come = [(quick, b"k1"), (slow, b"k2"), (quick, b"k3"), (quick, b"other"), (slow, b"x")]
    assert taken_in_one_turn(*come) == []
    assert (quick.wire.written, quick.taken) == ([b"K1", b"K3"], [b"other"])
    assert (slow.wire.written, slow.taken) == ([], [b"k2", b"x"])
    assert quick.answered_at > 0.0


def test_known_request_never_overtakes_an_earlier_unknown_one() -> None:
    link, beside = Link(is_quick=True), Link(is_quick=True)
    come = [(link, b"k1"), (link, b"other"), (beside, b"k2"), (link, b"k3")]
    assert taken_in_one_turn(*come) == []
    assert (link.wire.written, link.taken) == ([b"K1"], [b"other", b"k3"])
    assert (beside.wire.written, beside.taken) == ([b"K2"], [])


def test_fast_answers_do_not_wait_for_slow_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "MAX_WAIT_S", 0.0)
    first, second = Link(is_quick=True), Link(is_quick=True)
    seen: list[int] = []

    class Slow(Known):
        def answer(self, request: bytes, now_s: float) -> bytes | None:
            seen.append(len(first.wire.written))
            return super().answer(request, now_s)

    come = (first, b"k1"), (second, b"k2"), (first, b"k3")
    assert taken_in_one_turn(*come, known=Slow(None, {}, now_s=time.monotonic)) == []
    assert (seen, first.wire.written, second.wire.written) == ([0, 1, 1], [b"K1", b"K3"], [b"K2"])


def test_unwritable_connection_ends_alone() -> None:
    closed, waits = Link(is_quick=True), Link(is_quick=True)
    closed.wire.is_closed = True
    failures = taken_in_one_turn((closed, b"k1"), (waits, b"k2"), (waits, b"x"))
    assert [type(each) for each in failures] == [RuntimeError]
    assert (waits.wire.written, waits.taken) == ([b"K2"], [b"x"])
    assert (closed.wire.is_aborted, waits.wire.is_aborted) == (True, False)


def test_failing_connection_ends_alone_and_is_reported() -> None:
    fails, waits = Link(is_quick=False), Link(is_quick=True)
    failures = taken_in_one_turn((waits, b"k1"), (fails, b"bad"), (waits, b"k2"), (waits, b"x"))
    assert [type(each) for each in failures] == [KeyError]
    assert (waits.wire.written, waits.taken) == ([b"K1", b"K2"], [b"x"])
    assert (fails.wire.is_aborted, waits.wire.is_aborted) == (True, False)
