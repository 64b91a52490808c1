"""ROUTER and DEALER sockets for `common.wire.messages`, encrypted with the run's CURVE keys.

A ROUTER answers many peers. A DEALER is connected to one ROUTER and reconnects by itself. A ROUTER
accepts only connections with a key of the run, and only messages that this key allows. No call
blocks forever: every receive has a timeout, and a send never waits for a peer that does not read.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.auth.thread

from common.errors import ConfigError, PeerMissing, WireError
from common.wire.access.bounds import CURVE_BYTES, MAX_FRAME_BYTES
from common.wire.access.connections import HANDSHAKE_S, Connections
from common.wire.access.identities import Identities, Identity
from common.wire.access.peers import Peers, Sender
from common.wire.addresses import Addresses, bracketed
from common.wire.codec import decode, encode, in_version
from common.wire.messages import SCHEMA_VERSION, Rejected
from common.wire.security import RunKeys
from common.wire.versions import accepted_version, version_of

logger = logging.getLogger(__name__)

POLL_S = 0.05  # Seconds between two polls for an address that is not known yet.
ASLEEP_S = 1.0  # A longer gap between two polls means that this process was suspended.
HIGH_WATER_MARK = 10_000  # Queue length of a DEALER at which a send blocks.
PEER_QUEUE = 1_000  # Queue length of a ROUTER, per peer and direction.
# Send flags as ints: each | of two enum members is a slow lookup.
_MORE, _LAST = int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.NOBLOCK)
BACKLOG = 4_096  # Length of the listen backlog, equal to Linux's default maximum.
# TCP keepalive detects half-open connections. ZeroMQ's heartbeats abort the process if a peer with
# a full queue disconnects (libzmq 4.3.5, stream_engine_base.cpp: assertion !_io_error).
PROBE_AFTER_S = 3
PROBE_EVERY_S = 2
NUM_PROBES = 3
UNREAD_MS = 10_000  # Time without a TCP acknowledgement after which a peer is disconnected.
CONNECT_MS = 3_000  # Timeout of one attempt. TCP alone doubles its delays while a link is down.


@dataclass(slots=True, kw_only=True)
class Received:
    """A message, the ROUTER identity of its sender, and its encoded frames."""

    sender: bytes
    message: Any
    frames: list[bytes]


def _set_options(socket: Any, *, queue: int) -> None:
    """Set the options of a socket: IPv6, queue limits, keep-alive and timeouts."""
    socket.setsockopt(zmq.IPV6, 1)  # Enables IPv6 in addition to IPv4.
    socket.setsockopt(zmq.LINGER, 1_000)
    socket.setsockopt(zmq.SNDHWM, queue)
    socket.setsockopt(zmq.RCVHWM, queue)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, PROBE_AFTER_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, PROBE_EVERY_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, NUM_PROBES)
    socket.setsockopt(zmq.TCP_MAXRT, UNREAD_MS)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2_000)


class Router:
    """A bound ROUTER. Use from one thread. Only `wake` and `report` are thread-safe.

    Example:
        router = Router(keys, host="127.0.0.1", port=0)
        for received in router.receive_all(timeout_s=0.1):
            router.send(received.sender, answer)
    """

    def __init__(
        self, keys: RunKeys, *, host: str, port: int, max_frame_bytes: int = MAX_FRAME_BYTES
    ) -> None:
        """Bind and listen. A peer that sends a frame over `max_frame_bytes` is disconnected."""
        if not keys.server_secret:
            raise ConfigError("a process with the key of a joining node cannot listen")
        self._wake: int | None = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()
        self._poller = zmq.Poller()
        self._poller.register(self._wake, zmq.POLLIN)
        self._context = zmq.Context()
        self._auth = zmq.auth.thread.ThreadAuthenticator(self._context)
        self._auth.start()
        self._auth.configure_curve_callback(domain="*", credentials_provider=_Authenticator(keys))
        self._socket = self._context.socket(zmq.ROUTER)
        _set_options(self._socket, queue=PEER_QUEUE)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes + CURVE_BYTES)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1_000))
        self._socket.setsockopt(zmq.BACKLOG, BACKLOG)
        self._socket.curve_server = True
        self._socket.curve_publickey = keys.server_public.encode()
        self._socket.curve_secretkey = keys.server_secret.encode()
        self._connections = Connections(self._socket)
        self._connections.start()
        try:
            self.port: int = (
                self._socket.bind_to_random_port(f"tcp://{bracketed(host)}")
                if port == 0
                else (self._socket.bind(f"tcp://{bracketed(host)}:{port}"), port)[1]
            )
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot bind {host}:{port}: {error.strerror}") from error
        self._peers = Peers(keys.known())
        self._poller.register(self._socket, zmq.POLLIN)

    def receive_all(self, *, timeout_s: float, limit: int = 1_000) -> list[Received]:
        """Wait up to `timeout_s` for a first message; return it and those already queued.

        An invalid or forbidden message is counted and answered with `Rejected`.
        """
        received: list[Received] = []
        for sender, peer, frames in self._receive(timeout_s=timeout_s, limit=limit):
            if peer.muted_until:  # An earlier message of this batch has muted the peer.
                peer.account.num_dropped += 1
                continue
            peer.version = version_of(frames) or SCHEMA_VERSION
            try:
                message = decode(frames)
                reason = peer.identity.why_not(message)
                is_forbidden = True
            except WireError as error:
                message = None
                reason = str(error)
                is_forbidden = False
            if reason:
                self._peers.count_refusal(peer, reason, is_forbidden=is_forbidden)
                answer = Rejected(reason=reason[:500])
                self.send_frames(sender, encode(answer, self.version_for(sender)))
                continue
            received.append(Received(sender=sender, message=message, frames=frames))
        return received

    def receive_frames(self, *, timeout_s: float, limit: int = 1_000) -> list[list[bytes]]:
        """Wait as `receive_all` does; return each message's sender and frames, not decoded."""
        came = self._receive(timeout_s=timeout_s, limit=limit)
        return [[sender, *frames] for sender, _, frames in came]

    def _receive(self, *, timeout_s: float, limit: int) -> list[tuple[bytes, Sender, list[bytes]]]:
        """Return (identity, sender, frames) of received messages, up to `limit`."""
        ready = dict(self._poller.poll(int(timeout_s * 1_000)))
        if self._wake is not None and self._wake in ready:
            os.eventfd_read(self._wake)
        self._peers.refresh()
        received: list[tuple[bytes, Sender, list[bytes]]] = []
        heard = self._connections.heard
        num = 0
        while self._socket in ready and num < limit:
            try:
                first = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            num += 1
            sender = first.bytes
            peer = self._peers.register_sender(sender, first)
            heard.add(peer.descriptor)
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
            if self._peers.may_send(peer):
                received.append((sender, peer, frames))
        return received

    def note_refused(self, sender: bytes, reason: str) -> None:
        """Count a valid message that its receiver refused, as forbidden to its sender."""
        self._peers.note_refused(sender, reason)

    def peer(self, sender: bytes) -> Identity:
        """Return the owner of the key with which a sender's connection was accepted."""
        return self._peers.owner_of(sender)

    @property
    def num_invalid(self) -> int:
        """Number of messages that could not be decoded."""
        return self._peers.num_invalid

    def num_refused(self, plane: str) -> dict[str, int]:
        """Return the numbers of refused messages and connections, by "plane/peer/reason"."""
        causes = self._connections.report()["refused"].items()
        counts = {**self._peers.num_refused(), **{f"strangers/{why}": num for why, num in causes}}
        return {f"{plane}/{name}": num for name, num in counts.items()}

    def report(self) -> dict[str, Any]:
        """Return the refused messages by peer, and the counts of connections."""
        return {"peers": self._peers.report(), "connections": self._connections.report()}

    def send(self, receiver: bytes, message: Any) -> bool:
        """Send; False if the receiver is disconnected or its queue is full (it sends again).

        A `Rejected` counts as a refused message of its receiver.
        """
        return not self.send_all([(receiver, message)])

    def send_all(self, answers: Sequence[tuple[bytes, Any]]) -> list[bytes]:
        """Send each as `send` does; return the receivers that are disconnected or full.

        A message object that is sent to several receivers of one schema version is encoded once.

        Raises: WireError: a receiver's version does not have the message.
        """
        # By `id`, which is unique while `answers` lives, and the receiver's version.
        encoded: dict[tuple[int, int], list[bytes]] = {}
        unsent: list[bytes] = []
        for receiver, message in answers:
            if isinstance(message, Rejected):
                self.note_refused(receiver, message.reason)
            key = (id(message), self.version_for(receiver))
            frames = encoded.get(key)
            if frames is None:
                frames = encoded[key] = encode(message, key[1])
            if not self.send_frames(receiver, frames):
                unsent.append(receiver)
        return unsent

    def version_for(self, receiver: bytes) -> int:
        """Return the lower schema version of this process and a receiver."""
        return min(self._peers.version_of(receiver), SCHEMA_VERSION)

    def send_frames(self, receiver: bytes, frames: list[bytes]) -> bool:
        """Send an encoded message; False if the receiver is disconnected or its queue is full."""
        first = receiver
        send = self._socket.send
        try:
            for frame in frames:
                send(first, _MORE)
                first = frame
            send(first, _LAST)
        except zmq.ZMQError as error:
            self._peers.note_unsent(receiver)
            logger.debug("cannot send receiver=%s reason=%s", receiver.hex(), error.strerror)
            return False
        return True

    def wake(self) -> None:
        """Make the current or the next `receive_all` return at once. Thread-safe."""
        with self._wake_lock:
            if self._wake is not None:
                os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Close the socket, its authenticator and its context."""
        self._connections.stop()
        self._socket.close(linger=200)
        self._auth.stop()
        self._context.term()
        with self._wake_lock:  # The system may reuse the number of a closed descriptor.
            wake = self._wake
            self._wake = None
        if wake is not None:
            os.close(wake)


class _Authenticator:
    """CURVE authenticator: accepts all keys of the run that are not revoked."""

    def __init__(self, keys: RunKeys) -> None:
        self._identities: Identities = keys.known()  # Only the authenticator's thread uses them.

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether the key of a new connection is accepted."""
        self._identities.refresh()
        identity = self._identities.find(key.decode())
        return identity is not None and not identity.is_revoked


def connect_dealer(
    context: Any, keys: RunKeys, *, address: str, identity: str = "", timeout_s: float = 30.0
) -> Any:
    """Return a DEALER connected to a Router's address. Works for sync and asyncio contexts.

    Args:
        identity: ROUTER identity; "" lets ZeroMQ choose. A restarted peer must not reuse an
            identity that still has messages in flight.
        timeout_s: timeout of a send or receive, which then raises zmq.Again.
    """
    socket = context.socket(zmq.DEALER)
    _set_options(socket, queue=HIGH_WATER_MARK)
    socket.setsockopt(zmq.SNDTIMEO, int(timeout_s * 1_000))
    socket.setsockopt(zmq.RCVTIMEO, int(timeout_s * 1_000))
    if identity:
        socket.setsockopt(zmq.IDENTITY, identity.encode())
    socket.curve_serverkey = keys.server_public.encode()
    socket.curve_publickey = keys.client_public.encode()
    socket.curve_secretkey = keys.client_secret.encode()
    socket.connect(address)
    return socket


class FollowingDealer:
    """A connection to a role whose address comes from the scheduler or the run directory.

    It sends a hello on every new connection. A send never blocks, so a lost peer cannot stall the
    caller. If the peer refuses this process's schema version and uses the previous one, the
    connection is opened again and uses that version. With a zmq.asyncio context receive with
    `next`, with a plain one with `take_all`.

    Example: the scheduler restarts on another machine. `follow` finds the new address, drops the
    old connection with its queue, connects and sends the hello. The caller sends messages again
    that must not be lost.
    """

    def __init__(
        self,
        addresses: Addresses,
        role: str,
        keys: RunKeys,
        *,
        context: Any,
        hello: Callable[[], Any] | None = None,
    ) -> None:
        """Prepare a connection. `hello` returns the first message of each connection."""
        self._addresses = addresses
        self._role = role
        self._keys = keys
        self._context = context
        self._hello = hello
        self._socket: Any = None
        self._silent_s = 0.0
        self._polled_at = time.monotonic()
        self.address = ""
        self.version = SCHEMA_VERSION  # Schema version in which this side sends.
        self._is_reopened = False  # True: the connection is new since the last `follow`.

    def connect(self, *, timeout_s: float) -> None:
        """Connect, blocking. Raises: PeerMissing: the address was not known in time."""
        asyncio.run(self._find_and_open(timeout_s))

    async def connect_soon(self, *, timeout_s: float) -> None:
        """Connect like `connect`, without blocking the event loop."""
        await self._find_and_open(timeout_s)

    async def _find_and_open(self, timeout_s: float) -> None:
        """Wait for the peer's address, and connect. Raises: PeerMissing: there is none in time."""
        deadline = time.monotonic() + timeout_s
        while (address := self._addresses.find_address(self._role)) is None:
            if time.monotonic() > deadline:
                raise PeerMissing(
                    f"no {self._role} within {timeout_s:g} s: it has published no address"
                )
            await asyncio.sleep(POLL_S)
        self._open(address)

    def follow(self) -> bool:
        """Connect to the peer's current address; True if the connection is new since the last call.

        No task may wait in `next` during this call: closing a socket cancels its waiting tasks.
        """
        if not self.has_moved:
            is_new = self._is_reopened
            self._is_reopened = False
            return is_new
        address = self._addresses.find_address(self._role) or self.address
        logger.info("%s moved from=%s to=%s", self._role, self.address, address)
        self.use_newest_version()
        self._open(address)
        return True

    def use_newest_version(self) -> None:
        """Send in this process's own schema version again: the peer may have been upgraded."""
        self.version = SCHEMA_VERSION

    @property
    def has_moved(self) -> bool:
        """Whether the peer's published address differs from the connected one."""
        return self._addresses.find_address(self._role) not in (None, self.address)

    def reopen(self) -> None:
        """Open a new connection to the same address."""
        self._open(self.address)

    @property
    def silent_s(self) -> float:
        """Seconds without a message of the peer, or since the connection was opened.

        A gap between two polls counts as `ASLEEP_S` at most. A process that was suspended for
        minutes has its peer's messages in the queue and must read them first.
        """
        return self._silent_s + min(time.monotonic() - self._polled_at, ASLEEP_S)

    def _note_poll(self, *, is_heard: bool) -> None:
        """Update the silence after a poll of the queue."""
        self._silent_s = 0.0 if is_heard else self.silent_s
        self._polled_at = time.monotonic()

    def send(self, message: Any) -> bool:
        """Send at once; False, with a warning, if the queue to the peer is full.

        Raises: WireError: the message is invalid or too large, see `encode`.
        """
        return self.send_frames(encode(message, self.version), of=type(message).__name__)

    def send_frames(self, frames: list[bytes], *, of: str) -> bool:
        """Send the frames of an encoded message of the type named `of`, as `send` does."""
        try:
            sent = self._socket.send_multipart(in_version(frames, self.version), zmq.NOBLOCK)
            if isinstance(sent, asyncio.Future) and sent.done():
                sent.result()
        except zmq.Again:
            logger.warning("queue to %s is full, dropped %s", self._role, of)
            return False
        return True

    async def next(self, *, timeout_s: float) -> Any | None:
        """Return the peer's next message, None if none comes in time.

        Raises: WireError: the peer's schema version is too old or too new; names both commits.
        """
        is_heard = bool(await self._socket.poll(int(timeout_s * 1_000)))
        self._note_poll(is_heard=is_heard)
        return self._decoded(await self._socket.recv_multipart()) if is_heard else None

    def take_all(self) -> list[Any]:
        """Return the queued messages without waiting. Raises: WireError: as `next`."""
        taken: list[Any] = []
        is_heard = False
        while self._socket.poll(0):
            is_heard = True
            message = self._decoded(self._socket.recv_multipart())
            if message is not None:
                taken.append(message)
        self._note_poll(is_heard=is_heard)
        return taken

    def _decoded(self, frames: list[bytes]) -> Any | None:
        """Return a message; None for a refusal after which this side uses an older version."""
        message = decode(frames)
        version = accepted_version(message, frames, current=self.version)
        if version == self.version:
            return message
        logger.info("%s uses schema version=%d own=%d", self._role, version, SCHEMA_VERSION)
        self.version = version
        self._is_reopened = True
        self._open(self.address)
        return None

    def close(self, *, linger_s: float) -> None:
        """Close after at most `linger_s` seconds, in which queued messages are sent."""
        if self._socket is not None:
            self._socket.close(linger=int(linger_s * 1_000))
        self._socket = None
        self.address = ""

    def _open(self, address: str) -> None:
        """Connect to an address, and send the hello."""
        self.close(linger_s=0.0)
        self.address = address
        self._socket = connect_dealer(self._context, self._keys, address=address)
        self._silent_s = 0.0
        self._polled_at = time.monotonic()
        if self._hello is not None:
            self.send(self._hello())
