"""Laws of a ROUTER among strangers and peers that mean harm."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq

from common.wire.access import connections as connections_module
from common.wire.access.connections import Connections, raise_file_limit
from common.wire.access.identities import revoke
from common.wire.access.peers import MAX_REFUSALS
from common.wire.codec import decode, encode
from common.wire.messages import Goodbye, Hello, LeaseGrant, LeaseRequest, Outcomes, Rejected
from common.wire.security import RunKeys, create_keys, own_keys
from common.wire.sockets import MAX_FRAME_BYTES, Router, connect_dealer
from tests.bounds import at_most

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


def wait_for(condition: object, what: str) -> None:
    assert callable(condition)
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.timed
def test_non_reading_peer_delays_no_other_peer(
    server: Server, folder: Path, context: zmq.Context
) -> None:
    friend = connect(context, server, own_keys(folder, role="actor", name="actor-0"))
    deaf = connect(context, server, own_keys(folder, role="actor", name="deaf"))
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
    assert worst_s < at_most(1.0)
    assert psutil.Process().memory_info().rss - memory_before < 150 << 20
    told = server.router.report
    wait_for(lambda: told()["peers"].get("deaf", {}).get("unsent"), "not counted")


@pytest.mark.slow
@pytest.mark.timed
def test_hostile_messages_are_counted_without_delaying_peers(
    server: Server, folder: Path, context: zmq.Context
) -> None:
    friend = connect(context, server, own_keys(folder, role="actor", name="actor-0"))
    enemy = connect(context, server, own_keys(folder, role="actor", name="enemy"))
    seconds_of_an_answer(friend)
    kinds = [
        [b"\xc1 rubbish"],
        encode(Hello(role="learner", name="enemy", incarnation="i", version=10**9)),
        encode(Outcomes(num_duplicates=5)),
        [b"\x93\x03\xc6\xff\xff\xff\xff"],
        [b""],
    ]
    worst_s, num = 0.0, 20_000
    for number in range(num):
        enemy.send_multipart(kinds[number % len(kinds)])
        if number % 1_000 == 0:
            worst_s = max(worst_s, seconds_of_an_answer(friend))

    def counted() -> int:
        told = server.router.report()["peers"].get("enemy", {})
        return sum(told.get(each, 0) for each in ("invalid", "forbidden", "dropped"))

    wait_for(lambda: counted() == num, f"{counted()} of {num} are counted")
    assert worst_s < at_most(1.0)
    told = server.router.report()["peers"]
    assert set(told) == {"enemy"}
    assert told["enemy"]["dropped"] > num - 10 * MAX_REFUSALS, "nothing of it was decoded any more"


def test_actor_cannot_impersonate_another_peer(
    server: Server, folder: Path, context: zmq.Context
) -> None:
    dealer = connect(context, server, own_keys(folder, role="actor", name="actor-0"))
    for message in (
        Hello(role="learner", name="actor-0", incarnation="i", version=10**9),
        Hello(role="actor", name="actor-1", incarnation="i", version=0),
        Goodbye(role="actor", name="actor-1", incarnation="i"),
        LeaseRequest(actor="actor-1", num_free_slots=1, version=0),
        Outcomes(num_duplicates=1),
    ):
        dealer.send_multipart(encode(message))
        assert dealer.poll(5_000)
        assert isinstance(decode(dealer.recv_multipart()), Rejected), message
    seconds_of_an_answer(dealer)
    assert server.router.report()["peers"]["actor-0"]["forbidden"] == 5


def test_revoked_key_ends_rights_of_its_holder(
    server: Server, folder: Path, context: zmq.Context
) -> None:
    keys = own_keys(folder, role="actor", name="actor-0")
    dealer, other = connect(context, server, keys), own_keys(folder, role="actor", name="b")
    seconds_of_an_answer(dealer)
    revoke(folder, "actor-0")

    def is_refused() -> bool:
        dealer.send_multipart(ASK)
        assert dealer.poll(5_000)
        return isinstance(decode(dealer.recv_multipart()), Rejected)

    wait_for(is_refused, "a connection keeps its rights")
    again = connect(context, server, keys)
    again.setsockopt(zmq.SNDTIMEO, 0)
    with contextlib.suppress(zmq.Again):  # The router may refuse it earlier.
        again.send_multipart(ASK)
    wait_for(
        lambda: server.router.report()["connections"]["refused"].get("key"),
        "a revoked key is let in",
    )
    assert not again.poll(100)
    ask = encode(LeaseRequest(actor="b", num_free_slots=1, version=0))
    seconds_of_an_answer(connect(context, server, other), ask)


def push(stranger: socket.socket, num_bytes: int) -> int:
    """Send a frame of such a size, or a GB of it; return how much of it was taken."""
    sent, part = 0, bytes(1 << 20)
    with contextlib.suppress(OSError):
        stranger.sendall(b"\x06" + num_bytes.to_bytes(8, "big"))
        while sent < 1 << 30:
            stranger.sendall(part)
            sent += len(part)
    return sent


def test_stranger_cannot_fill_the_memory(server: Server) -> None:
    memory_before = psutil.Process().memory_info().rss
    for num_bytes in (1 << 40, MAX_FRAME_BYTES + 1, MAX_FRAME_BYTES - 1):
        with socket.create_connection((HOST, server.router.port)) as stranger:
            stranger.settimeout(5.0)
            stranger.sendall(GREETING)
            stranger.recv(64, socket.MSG_WAITALL)
            assert push(stranger, num_bytes) < 200 << 20
    assert psutil.Process().memory_info().rss - memory_before < 100 << 20
    told = server.router.report
    wait_for(lambda: sum(told()["connections"]["refused"].values()) == 3, "not counted")
    assert set(told()["connections"]["refused_by_address"]) <= {HOST, ""}


@contextlib.contextmanager
def watched_by_hand(context: zmq.Context) -> Iterator[tuple[Connections, socket.socket]]:
    """Yield the monitor of an unencrypted ROUTER, without its thread, and a connected peer."""
    watched = context.socket(zmq.ROUTER)
    watched.setsockopt(zmq.LINGER, 0)
    connections = Connections(watched)
    port = watched.bind_to_random_port(f"tcp://{HOST}")
    try:
        with socket.create_connection((HOST, port)) as peer:
            wait_for(lambda: connections._monitor.poll(0), "not accepted")
            connections._process_events()
            yield connections, peer
    finally:
        watched.disable_monitor()
        connections._monitor.close(linger=0)
        watched.close()


def test_vanished_stranger_is_counted_as_refused(context: zmq.Context) -> None:
    with watched_by_hand(context) as (connections, stranger):
        (descriptor,) = connections._pending
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        stranger.close()
        wait_for(lambda: not os.path.exists(f"/proc/self/fd/{descriptor}"), "not closed")
        connections._check(time.monotonic())
        assert connections.report()["refused"] == {}
        connections._process_events()
        assert connections.report()["refused"] == {"handshake": 1}
        assert connections.report()["open"] == 0


PLAIN = GREETING[:12] + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x1c\x05READY\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
PART = b"\x03" + (1_000_000).to_bytes(8, "big") + bytes(1_000_000)  # and there is more of it


def test_endless_message_is_cut_complete_ones_pass(
    context: zmq.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        ("MAX_HANDSHAKE_ANSWER_BYTES", 64),
        ("MAX_UNHEARD_BYTES", 2_500_000),
        ("CHECK_ALL_S", 0),
    ):
        monkeypatch.setattr(connections_module, name, value)
    with watched_by_hand(context) as (connections, peer):
        (each,) = connections._known.values()
        peer.settimeout(5.0)
        peer.sendall(PLAIN + READY)
        peer.recv(100, socket.MSG_WAITALL)

        def is_let_in() -> bool:
            connections._check(time.monotonic())
            return not connections._pending

        def num_received() -> int:
            info = connections_module._info(each)
            assert info is not None, "it was ended"
            return connections_module._number(info[connections_module.BYTES_RECEIVED])

        def send_a_part(*, has_message: bool) -> None:
            wanted = num_received() + len(PART)
            peer.sendall(PART)
            wait_for(lambda: num_received() >= wanted, "not taken")
            connections.heard = {each.descriptor} if has_message else set()
            connections._check(time.monotonic())

        wait_for(is_let_in, "not let in")
        for _ in range(5):
            send_a_part(has_message=True)
        for _ in range(3):
            send_a_part(has_message=False)
        assert connections.report()["refused"] == {}
        send_a_part(has_message=False)
        assert connections.report()["refused"] == {"endless message": 1}


SMALL = """
import resource, sys, threading
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
from pathlib import Path
from common.store.run_dir import write_atomically
from tests.common.wire.test_hostile_peers import Server
from common.wire.security import load_keys
server = Server(load_keys(Path(sys.argv[1]) / "keys"))
server.start()
print(server.router.port, flush=True)
for line in sys.stdin:
    write_atomically(Path(sys.argv[1]) / "status.json", "{}")
    print(server.router.report()["connections"]["open"], flush=True)
server.close()
"""


@pytest.mark.slow
@pytest.mark.timed
def test_idle_connections_leave_room_for_friendly_peers(
    tmp_path: Path, folder: Path, context: zmq.Context
) -> None:
    assert raise_file_limit() > 3_200
    child = subprocess.Popen(
        [sys.executable, "-c", SMALL, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": "."},
    )
    assert child.stdin is not None
    assert child.stdout is not None
    port = int(child.stdout.readline())
    strangers: list[socket.socket] = []
    try:
        friend = connect_to(context, port, own_keys(folder, role="actor", name="actor-0"))
        seconds_of_an_answer(friend)
        for _ in range(3_000):
            strangers.append(socket.create_connection((HOST, port), timeout=10))
            if len(strangers) % 500 == 0:
                child.stdin.write("look\n")
                child.stdin.flush()
                assert int(child.stdout.readline()) <= 1_024
                assert seconds_of_an_answer(friend) < at_most(1.0)
        newcomer = connect_to(context, port, own_keys(folder, role="actor", name="b"))
        ask = encode(LeaseRequest(actor="b", num_free_slots=1, version=0))
        assert seconds_of_an_answer(newcomer, ask) < at_most(1.0)
    finally:
        for stranger in strangers:
            stranger.close()
        child.stdin.close()
        child.stdout.close()
        ended = ends(child)
    assert ended


def ends(child: subprocess.Popen[str]) -> bool:
    """Return whether a process ends well by itself; afterwards it is gone in any case."""
    try:
        return child.wait(90) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        child.kill()
        child.wait(60)


UNREAD = """
import socket, time, zmq
from common.wire.access.connections import Connections
watched = zmq.Context().socket(zmq.ROUTER)
connections = Connections(watched)
port = watched.bind_to_random_port("tcp://127.0.0.1")
connections._process_events = lambda: time.sleep(.1)
connections.start()
for _ in range(3_000):
    socket.create_connection(("127.0.0.1", port)).close()
connections.stop()
"""


@pytest.mark.slow
def test_socket_closes_with_thousands_of_unread_connections() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", UNREAD], env={**os.environ, "PYTHONPATH": "."}, encoding="utf-8"
    )
    assert ends(child)
