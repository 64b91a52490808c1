"""Laws of the line that follows its peer, against real sockets."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from common.errors import LongstrideError
from common.store.run_dir import RunDir
from common.wire.messages import Ack, Hello, Rejected
from common.wire.security import RunKeys, create_keys
from common.wire.sockets import FollowingDealer, Received, Router

HOST = "127.0.0.1"
WAIT_S = 20.0
HELLO = Hello(role="actor", name="a", incarnation="i", version=0)


class Peer:
    """A learner that can come back at another address."""

    def __init__(self, root: Path) -> None:
        self.run_dir = RunDir(root=root)
        self.keys: RunKeys = create_keys(root / "keys")
        self._routers: list[Router] = []
        self.move()

    def move(self) -> None:
        """Listen at a new address; the old one no longer answers."""
        self.close()
        self._routers.append(Router(self.keys, host=HOST, port=0))
        self.run_dir.publish_address("learner", f"tcp://{HOST}:{self._routers[-1].port}")

    def receive(self) -> Received:
        """The next message."""
        (received,) = self._routers[-1].receive_all(timeout_s=WAIT_S, limit=1)
        return received

    def answer(self, received: Received) -> None:
        assert self._routers[-1].send(received.sender, Rejected(reason="heard"))

    def close(self) -> None:
        if self._routers:
            self._routers.pop().close()


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    peer = Peer(tmp_path)
    yield peer
    peer.close()


def test_hello_is_repeated_after_a_peer_moves(peer: Peer) -> None:
    context = zmq.Context()
    line = FollowingDealer(peer.run_dir, "learner", peer.keys, context=context, hello=lambda: HELLO)
    line.connect(timeout_s=WAIT_S)
    assert peer.receive().message == HELLO
    assert not line.follow()
    peer.move()
    assert line.follow()
    assert not line.follow()
    assert peer.receive().message == HELLO
    ack = Ack(episode_id="e", is_accepted=True, reason="")
    assert line.send(ack)
    assert peer.receive().message == ack
    line.close(linger_s=0.0)
    context.term()


def test_event_loop_receives_messages_within_a_deadline(peer: Peer) -> None:
    async def law() -> None:
        context = zmq.asyncio.Context()
        line = FollowingDealer(
            peer.run_dir, "learner", peer.keys, context=context, hello=lambda: HELLO
        )
        await line.connect_soon(timeout_s=WAIT_S)
        assert await line.next(timeout_s=0.01) is None
        peer.answer(await asyncio.to_thread(peer.receive))
        assert await line.next(timeout_s=WAIT_S) == Rejected(reason="heard")
        assert line.silent_s < WAIT_S
        line.close(linger_s=0.0)
        context.destroy(linger=0)

    asyncio.run(law())


def test_suspended_process_does_not_count_peer_silence(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped for minutes: the peer's words are in the queue, and read before it is judged."""
    context = zmq.Context()
    line = FollowingDealer(peer.run_dir, "learner", peer.keys, context=context, hello=lambda: HELLO)
    line.connect(timeout_s=WAIT_S)
    line.take_all()
    began = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began + 600.0)
    assert line.silent_s <= 2.0
    line.take_all()
    assert line.silent_s <= 2.0
    line.close(linger_s=0.0)
    context.term()


def test_missing_peer_address_raises_by_name(peer: Peer) -> None:
    context = zmq.Context()
    line = FollowingDealer(peer.run_dir, "scheduler", peer.keys, context=context)
    with pytest.raises(LongstrideError, match="no scheduler within"):
        line.connect(timeout_s=0.01)
    line.close(linger_s=0.0)
    context.term()
