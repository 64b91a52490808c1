"""Laws of two peers of consecutive schema versions, over real sockets."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from common.errors import WireError
from common.store.run_dir import RunDir
from common.wire.codec import decode, encode
from common.wire.messages import SCHEMA_VERSION, Hello
from common.wire.security import create_keys
from common.wire.sockets import FollowingDealer, Router, connect_dealer
from common.wire.versions import PREVIOUS_VERSION, version_of
from tests.common.wire.other_code import ACK, OtherCode

HOST = "127.0.0.1"
WAIT_S = 60.0
HELLO = Hello(role="actor", name="a", incarnation="i", version=0, commit="commit 77aa")


class Line:
    """A dealer that follows the published address of a learner."""

    def __init__(self, root: Path) -> None:
        self.run_dir = RunDir(root=root)
        self.keys = create_keys(root / "keys")
        self.context: Any = zmq.Context()
        self.peers: list[OtherCode] = []
        self.dealer = FollowingDealer(
            self.run_dir, "learner", self.keys, context=self.context, hello=lambda: HELLO
        )

    def serve(self, version: int) -> OtherCode:
        """Start a peer at a new address, which replaces the earlier one."""
        peer = OtherCode(self.keys, version)
        self.peers.append(peer)
        self.run_dir.publish_address("learner", peer.address)
        return peer

    def answer(self) -> Any:
        """Return the next message. The test's timeout bounds the wait."""
        done = threading.Event()
        while not done.wait(0.01):
            for message in self.dealer.take_all():
                return message

    def close(self) -> None:
        self.dealer.close(linger_s=0.0)
        self.context.term()
        for peer in self.peers:
            peer.stop()


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    line = Line(tmp_path)
    yield line
    line.close()


def test_dealer_repeats_its_hello_to_an_older_peer(line: Line) -> None:
    old = line.serve(PREVIOUS_VERSION)
    line.dealer.connect(timeout_s=WAIT_S)
    assert line.answer() == ACK
    assert old.received == [decode(encode(HELLO, PREVIOUS_VERSION))]
    assert line.dealer.version == PREVIOUS_VERSION
    assert line.dealer.follow()  # The connection is new: messages before it may be lost.
    assert not line.dealer.follow()
    line.dealer.send_frames(encode(ACK), of="Ack")  # Encoded before the version was known.
    assert line.answer() == ACK
    assert old.received[-1] == ACK


def test_dealer_uses_its_newest_version_with_an_upgraded_peer(line: Line) -> None:
    line.serve(PREVIOUS_VERSION)
    line.dealer.connect(timeout_s=WAIT_S)
    assert line.answer() == ACK
    new = line.serve(SCHEMA_VERSION)
    assert line.dealer.follow()
    assert line.answer() == ACK
    assert new.received == [HELLO]


def test_dealer_names_a_peer_that_is_too_old(line: Line) -> None:
    line.serve(PREVIOUS_VERSION - 1)
    line.dealer.connect(timeout_s=WAIT_S)
    with pytest.raises(WireError, match=r"this process uses 2; this process is .* one schema"):
        line.answer()


def test_router_answers_each_peer_in_its_own_version(tmp_path: Path) -> None:
    keys = create_keys(tmp_path)
    context = zmq.Context()
    router = Router(keys, host=HOST, port=0)
    try:
        address = f"tcp://{HOST}:{router.port}"
        versions = (PREVIOUS_VERSION, SCHEMA_VERSION)
        lines = [connect_dealer(context, keys, address=address) for _ in versions]
        for each, version in zip(lines, versions, strict=True):
            each.send_multipart(encode(HELLO, version))
        received = []
        while len(received) < len(lines):
            received += router.receive_all(timeout_s=WAIT_S)
        assert router.send_all([(each.sender, ACK) for each in received]) == []
        assert [version_of(each.recv_multipart()) for each in lines] == [*versions]
        for each in lines:
            each.close(linger=0)
    finally:
        router.close()
        context.term()


def test_refusal_of_a_distant_version_reaches_its_sender(tmp_path: Path) -> None:
    keys = create_keys(tmp_path)
    context = zmq.Context()
    router = Router(keys, host=HOST, port=0)
    try:
        line = connect_dealer(context, keys, address=f"tcp://{HOST}:{router.port}")
        for version in (PREVIOUS_VERSION - 1, SCHEMA_VERSION + 1):
            head, *rest = encode(HELLO)
            line.send_multipart([head[:1] + bytes([version]) + head[2:], *rest])
            assert router.receive_all(timeout_s=WAIT_S) == []
            answer = line.recv_multipart()
            assert version_of(answer) == min(version, SCHEMA_VERSION)
            reason = decode(answer).reason
            assert reason.startswith(f"schema version {version} of commit 77aa, but ")
        line.close(linger=0)
    finally:
        router.close()
        context.term()
