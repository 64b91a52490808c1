"""Limits on the TCP connections of a ROUTER: their number, and their bytes without a message.

libzmq accepts every connection. A thread receives an event for each one from the socket's monitor.
It closes connections that exceed the limits before or after their CURVE handshake.
"""

import contextlib
import logging
import resource
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from common.wire.access.bounds import MAX_MESSAGE_BYTES

logger = logging.getLogger(__name__)

MAX_PENDING = 4_096  # Maximum number of unauthenticated connections; the oldest one is closed.
HANDSHAKE_S = 10.0  # Seconds after which libzmq closes an unauthenticated connection.
MAX_HANDSHAKE_BYTES = 16_384  # Maximum number of bytes that an unauthenticated connection may send.
# Maximum number of bytes of a connection between two complete messages.
MAX_UNHEARD_BYTES = MAX_MESSAGE_BYTES + (64 << 20)
CHECK_S = 0.25
CHECK_ALL_S = 2.0  # Seconds between two checks of the authenticated connections.
RESERVED_FILES = 256  # File descriptors kept free, or a quarter of the limit if that is less.
TCP_INFO_BYTES = 256
BYTES_ACKED, BYTES_RECEIVED = slice(120, 128), slice(128, 136)  # Fields of Linux's struct tcp_info.
# Maximum number of bytes sent to an unauthenticated peer: the greeting (64 bytes), the WELCOME of
# CURVE (170 bytes) and an ERROR (about 12 bytes). A connection with more bytes is authenticated.
# This check replaces libzmq's handshake event, which does not identify the connection.
MAX_HANDSHAKE_ANSWER_BYTES = 64 + 170 + 24
MAX_ADDRESSES = 1_000  # Maximum number of addresses with a counter of their own.
UNKNOWN = -1
EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_MONITOR_STOPPED
)
CAUSES = {
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "handshake",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "handshake",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "key",
}


def _monitor_of(watched: Any) -> Any:
    """Return a socket that receives the connection events of a socket, with an unlimited queue.

    A limit could deadlock. libzmq's thread would hold a lock while it waits for the reader. The
    thread that stops the monitor would wait for this lock and hold the GIL, which the reader
    needs. The cost of opening connections bounds the number of events.
    """
    address = f"inproc://connections-{id(watched)}"
    watched.monitor(address, EVENTS)
    monitor = watched.context.socket(zmq.PAIR)
    monitor.setsockopt(zmq.RCVHWM, 0)
    monitor.connect(address)
    return monitor


def raise_file_limit() -> int:
    """Raise the limit of file descriptors of this process to its maximum; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


@dataclass(slots=True)
class _Connection:
    """One open TCP connection of the socket."""

    descriptor: int  # File descriptor of libzmq, which closes it.
    address: str  # "" if the peer had already disconnected.
    peer: Any  # The address from `getpeername`.
    since: float
    is_counted: bool = False  # The connection is in the counts of refusals.
    num_bytes: int = UNKNOWN  # Bytes received, at the first check after the last message.


@dataclass(slots=True)
class _Counts:
    """Counts since the socket was created. One thread writes, any thread may read."""

    num_accepted: int = 0
    by_address: Counter[str] = field(default_factory=Counter[str])  # Refused or closed ones.
    by_cause: Counter[str] = field(default_factory=Counter[str])


class Connections(threading.Thread):
    """A thread that checks the connections of one socket.

    Consumes: connection events of libzmq's monitor.
    Waits for: those events, `CHECK_S` at most.
    Unblocked by: `stop`.
    """

    def __init__(self, watched: Any) -> None:
        """Create the monitor of a socket, which must not be bound yet."""
        super().__init__(name="connections", daemon=True)
        self._limit = raise_file_limit()
        self._limit -= min(RESERVED_FILES, self._limit // 4)
        self._max_pending = min(MAX_PENDING, self._limit // 2)
        self._watched = watched
        self._monitor = _monitor_of(watched)
        self._known: dict[int, _Connection] = {}
        self._pending: dict[int, _Connection] = {}  # Unauthenticated connections, oldest first.
        self._stop_requested = threading.Event()
        self._counts = _Counts()
        self._check_all_at = 0.0
        self._cause = ""  # Why the handshake of the next closed connection failed.
        # Descriptors that have received a complete message. The socket's thread adds them.
        self.heard: set[int] = set()

    def run(self) -> None:
        """Process events and check connections until stopped."""
        check_at = 0.0
        while not self._stop_requested.is_set():
            if self._monitor.poll(int(CHECK_S * 1_000)):
                self._process_events()
            now = time.monotonic()
            if now >= check_at:
                check_at = now + CHECK_S
                self._check(now)
        self._monitor.close(linger=0)

    def stop(self) -> None:
        """End the thread and the monitor. Call from the socket's own thread."""
        self._watched.disable_monitor()
        self._stop_requested.set()
        self.join(timeout=5.0)

    def report(self) -> dict[str, Any]:
        """Return the counts of accepted and refused connections, for a report."""
        counts = self._counts
        return {
            "open": len(self._known),
            "accepted": counts.num_accepted,
            "refused": dict(counts.by_cause),
            "refused_by_address": dict(counts.by_address.most_common(20)),
        }

    def _process_events(self) -> None:
        """Process all events that the monitor has reported."""
        for _ in range(1_000):
            self._process_event(recv_monitor_message(self._monitor))  # pyright: ignore[reportUnknownArgumentType]
            if not self._monitor.poll(0):
                return

    def _process_event(self, event: Any) -> None:
        """Process one event of the monitor: an opened or a closed connection."""
        kind = event["event"]
        descriptor = event["value"]
        if kind == zmq.EVENT_ACCEPTED:
            self._accept(descriptor)
        elif kind in CAUSES:
            self._cause = CAUSES[kind]
        elif kind in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED):
            ended = self._known.pop(descriptor, None)
            cause = self._cause
            self._cause = ""
            if self._pending.pop(descriptor, None) is not None and ended is not None:
                self._count(ended, cause or "handshake")

    def _accept(self, descriptor: int) -> None:
        """Register a connection; close the oldest unauthenticated ones over the limit."""
        self._counts.num_accepted += 1
        peer = _peer_of(descriptor)
        address = str(peer[0]).removeprefix("::ffff:") if peer else ""
        connection = _Connection(descriptor, address, peer, time.monotonic())
        self._known[descriptor] = self._pending[descriptor] = connection
        is_full = len(self._known) > self._limit
        while len(self._pending) > self._max_pending or (is_full and self._pending):
            oldest = next(iter(self._pending.values()))
            if not self._is_authenticated(oldest, _info(oldest)):
                self._end(oldest, "too many")
                return

    def _is_authenticated(self, connection: _Connection, info: bytes | None) -> bool:
        """Return whether a connection is authenticated. If so, remove it from the pending ones."""
        if info is None:
            return False
        is_in = not info or _number(info[BYTES_ACKED]) > MAX_HANDSHAKE_ANSWER_BYTES
        if is_in:
            self._pending.pop(connection.descriptor, None)
            connection.num_bytes = _number(info[BYTES_RECEIVED])
        return is_in

    def _check(self, now: float) -> None:
        """Close connections that have sent too many bytes without a handshake or a message."""
        for connection in list(self._pending.values()):
            info = _info(connection)
            if info is None or self._is_authenticated(connection, info):
                continue
            if _number(info[BYTES_RECEIVED]) > MAX_HANDSHAKE_BYTES:
                self._end(connection, "too large")
        if now < self._check_all_at:
            return
        self._check_all_at = now + CHECK_ALL_S
        heard = self.heard
        self.heard = set()
        for connection in list(self._known.values()):
            if connection.descriptor in self._pending:
                continue
            if connection.descriptor in heard:  # This saves a system call for most connections.
                connection.num_bytes = UNKNOWN
                continue
            info = _info(connection)
            if info is None:
                continue
            num_bytes = _number(info[BYTES_RECEIVED])
            if connection.num_bytes == UNKNOWN:
                connection.num_bytes = num_bytes
            elif num_bytes - connection.num_bytes > MAX_UNHEARD_BYTES:
                self._end(connection, "endless message")

    def _end(self, connection: _Connection, cause: str) -> None:
        """Shut a connection down. libzmq detects this and closes it."""
        self._pending.pop(connection.descriptor, None)
        self._count(connection, cause)
        if connection.peer is None or _peer_of(connection.descriptor) != connection.peer:
            self._known.pop(connection.descriptor, None)
            return  # libzmq has closed the descriptor, and another file may have its number.
        with contextlib.suppress(OSError), _borrowed(connection.descriptor) as borrowed:
            borrowed.shutdown(socket.SHUT_RDWR)

    def _count(self, connection: _Connection, cause: str) -> None:
        """Count a refused connection, once, and log some of them."""
        if connection.is_counted:
            return
        connection.is_counted, counts = True, self._counts
        counts.by_cause[cause] += 1
        if len(counts.by_address) < MAX_ADDRESSES or connection.address in counts.by_address:
            counts.by_address[connection.address] += 1
        num = counts.by_cause[cause]
        if num <= 3 or num % 1_000 == 0:
            logger.warning("refused connection from=%s %s num=%d", connection.address, cause, num)


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Any:
    """Yield a socket object for a descriptor, and leave the descriptor open."""
    borrowed = socket.socket(fileno=descriptor)
    try:
        yield borrowed
    finally:
        borrowed.detach()


def _peer_of(descriptor: int) -> Any:
    """Return the address of the peer, None if it has disconnected."""
    try:
        with _borrowed(descriptor) as borrowed:
            return borrowed.getpeername()
    except OSError:
        return None


def _info(connection: _Connection) -> bytes | None:
    """Return the struct tcp_info of a connection, empty if the system does not support it.

    None: libzmq has closed the connection, and another file may have its descriptor. The event of
    its end is still in the queue.
    """
    try:
        with _borrowed(connection.descriptor) as borrowed:
            info = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
    except OSError:
        return None
    if _peer_of(connection.descriptor) not in (None, connection.peer):
        return None
    return info if len(info) >= BYTES_RECEIVED.stop else b""


def _number(field_bytes: bytes) -> int:
    return int.from_bytes(field_bytes, "little")
