"""Laws of a ROUTER among strangers and peers that mean harm."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq

from common.wire.codec import encode
from common.wire.messages import LeaseGrant, LeaseRequest
from common.wire.security import RunKeys, create_keys
from common.wire.sockets import MAX_FRAME_BYTES, Router, connect_dealer

HOST = "127.0.0.1"
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE".ljust(22, b"\0") + bytes(33)
ASK = encode(LeaseRequest(actor="actor-0", num_free_slots=1, version=0))
GRANT = LeaseGrant(leases=[], retry_after_s=0.1, reason="x" * 100)


class Server(threading.Thread):
    """Answers every request at a ROUTER until closed."""

    def __init__(self, keys: RunKeys) -> None:
        super().__init__(daemon=True)
        self.router = Router(keys, host=HOST, port=0)
        self._ends = threading.Event()

    def run(self) -> None:
        while not self._ends.is_set():
            for received in self.router.receive_all(timeout_s=0.05):
                self.router.send(received.sender, GRANT)
        self.router.close()

    def close(self) -> None:
        self._ends.set()
        self.join()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    create_keys(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    server = Server(create_keys(folder))
    server.start()
    yield server
    server.close()


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    for each in DEALERS:
        each.close(linger=0)
    DEALERS.clear()
    context.destroy(linger=0)


DEALERS: list[zmq.Socket] = []


def connect_to(context: zmq.Context, port: int, keys: RunKeys) -> zmq.Socket:
    DEALERS.append(connect_dealer(context, keys, address=f"tcp://{HOST}:{port}"))
    return DEALERS[-1]


def connect(context: zmq.Context, server: Server, keys: RunKeys) -> zmq.Socket:
    return connect_to(context, server.router.port, keys)


def seconds_of_an_answer(dealer: zmq.Socket, ask: list[bytes] = ASK) -> float:
    began = time.monotonic()
    dealer.send_multipart(ask)
    assert dealer.poll(10_000), "no answer within 10 s"
    dealer.recv_multipart()
    return time.monotonic() - began


@pytest.mark.slow
def test_a_peer_that_never_reads_holds_nobody_up(
    server: Server, folder: Path, context: zmq.Context
) -> None:
    friend = connect(context, server, create_keys(folder))
    deaf = connect(context, server, create_keys(folder))
    deaf.setsockopt(zmq.SNDTIMEO, 10_000)
    seconds_of_an_answer(friend)
    memory_before = psutil.Process().memory_info().rss
    ask = encode(LeaseRequest(actor="deaf", num_free_slots=1, version=0))

    def flood() -> None:
        for _ in range(75_000):
            deaf.send_multipart(ask)

    flooding = threading.Thread(target=flood)
    flooding.start()
    worst_s = max(seconds_of_an_answer(friend) for _ in range(100))
    flooding.join()
    assert worst_s < 1.0
    assert psutil.Process().memory_info().rss - memory_before < 150 << 20


def push(stranger: socket.socket, num_bytes: int) -> int:
    """Send a frame of such a size, or a GB of it; return how much of it was taken."""
    sent, part = 0, bytes(1 << 20)
    with contextlib.suppress(OSError):
        stranger.sendall(b"\x06" + num_bytes.to_bytes(8, "big"))
        while sent < 1 << 30:
            stranger.sendall(part)
            sent += len(part)
    return sent


def test_a_stranger_cannot_fill_the_memory(server: Server) -> None:
    memory_before = psutil.Process().memory_info().rss
    for num_bytes in (1 << 40, MAX_FRAME_BYTES + 1):
        with socket.create_connection((HOST, server.router.port)) as stranger:
            stranger.settimeout(5.0)
            stranger.sendall(GREETING)
            stranger.recv(64, socket.MSG_WAITALL)
            assert push(stranger, num_bytes) < 200 << 20
    assert psutil.Process().memory_info().rss - memory_before < 100 << 20
