"""Bounds on the connections of clients without a valid key, before and after a TLS handshake."""

import asyncio
import errno
import fcntl
import ipaddress
import logging
import os
import socket
import ssl
import struct
import sys
import termios
import time
from collections.abc import Callable

from common.wire.access.connections import BYTES_RECEIVED, TCP_INFO_BYTES

IDLE_S = 30  # Seconds of silence after which the system tests whether the client is reachable.
INTERVAL_S = 10
NUM_PROBES = 3


def has_unread_bytes(transport: asyncio.Transport) -> bool:
    """Return whether a client that closes its connection has left bytes of an answer unread.

    The bytes wait in this process or in the system, or the client has reset the connection.
    """
    if transport.get_write_buffer_size():
        return True
    descriptor = _descriptor(transport)
    if descriptor is None:
        return False
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            return True
        (unsent,) = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))
        return unsent > 0


def keep_alive(descriptor: int) -> None:
    """Let the system end a connection whose client has become unreachable without an end."""
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, INTERVAL_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, NUM_PROBES)


def _descriptor(transport: asyncio.Transport) -> int | None:
    """Return the descriptor of an open connection, None if it is closed."""
    place = transport.get_extra_info("socket")
    number = -1 if place is None else place.fileno()
    return number if number >= 0 else None


logger = logging.getLogger(__name__)

MAX_STRANGERS = 512  # Connections without a valid key, if other machines can connect.
MAX_OF_ADDRESS = 256  # These of one address, or of one IPv6 network of 64 bits.
FIRST_BYTE_S = 5.0  # Seconds in which a connection must send its first byte.
HANDSHAKE_S = 5.0  # Seconds for the whole handshake of TLS.
KEY_S = 10.0  # Seconds from the first byte of a request on in which a valid key must arrive.
IPV6_NETWORK_BITS = 64
GRACE_S = 0.5  # Age from which a silent connection is closed before all that have sent bytes.
PAUSE_S = 0.1  # Seconds without accepting a connection after the descriptors have run out.
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Strangers:
    """The connections without a valid key.

    Example: an address has `most_of_address` silent connections and opens another one. Its oldest
    silent connection is closed, so a client that sends its key at once is served during a flood.
    """

    def __init__(self, *, most: int = sys.maxsize, most_of_address: int = MAX_OF_ADDRESS) -> None:
        """Create an empty set. Without `most` nothing is bounded: only this machine connects."""
        self._most = most
        self._most_of_address = most_of_address
        self._by_address: dict[str, dict[Stranger, None]] = {}  # The oldest first.
        self._num = 0

    def add(
        self, peer: object, descriptor: Callable[[], int], close: Callable[[], object]
    ) -> "Stranger":
        """Count a new connection, and close others beyond the bounds.

        Args:
            peer: address of the client, as a socket reports it.
            descriptor: returns the descriptor of the connection, -1 once it is closed.
            close: closes the connection.
        """
        stranger = Stranger(self, network_of(peer), descriptor, close)
        if self._most == sys.maxsize:
            return stranger
        if descriptor() >= 0:
            keep_alive(descriptor())
        stranger.close_after(FIRST_BYTE_S)
        same = self._by_address.setdefault(stranger.address, {})
        same[stranger] = None
        self._num += 1
        while len(same) > self._most_of_address and _close_oldest(same):
            pass
        while self._num > self._most and _close_oldest(max(self._by_address.values(), key=len)):
            pass
        return stranger

    def remove(self, stranger: "Stranger") -> None:
        """Count a connection no longer; no effect if it does not count."""
        same = self._by_address.get(stranger.address, {})
        if stranger in same:
            del same[stranger]
            self._num -= 1
            if not same:
                del self._by_address[stranger.address]


class Stranger:
    """One connection without a valid key."""

    def __init__(
        self,
        strangers: Strangers,
        address: str,
        descriptor: Callable[[], int],
        close: Callable[[], object],
    ) -> None:
        """See `Strangers.add`."""
        self.address = address
        self._strangers = strangers
        self._descriptor = descriptor
        self._close = close
        self._timer: asyncio.TimerHandle | None = None
        self._began_s = time.monotonic()
        self._has_sent = False  # The operating system has received bytes.
        self._has_begun = False  # This process has read bytes of a request.

    def close_after(self, seconds: float) -> None:
        """Close the connection after some seconds, instead of an earlier deadline."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.close)

    def close_with(self, close: Callable[[], object]) -> None:
        """Close the connection with another function from now on."""
        self._close = close

    def note_bytes(self) -> None:
        """Record that bytes of a request have arrived."""
        if not self._has_begun:
            self._has_begun = True
            self._has_sent = True
            if self._timer is not None:
                self.close_after(KEY_S)

    def is_silent(self) -> bool:
        """Return whether the connection is not new and has sent no byte, not even to TLS."""
        if time.monotonic() - self._began_s < GRACE_S:
            return False
        number = self._descriptor()
        if not self._has_sent and number >= 0:
            with socket.socket(fileno=os.dup(number)) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
            self._has_sent = any(info[BYTES_RECEIVED])
        return not self._has_sent

    def has_unread_bytes(self) -> bool:
        """Return whether the operating system holds bytes that this process has not read yet."""
        number = self._descriptor()
        if number < 0:
            return False
        (unread,) = struct.unpack("i", fcntl.ioctl(number, termios.FIONREAD, bytes(4)))
        return unread > 0

    def close(self) -> None:
        """Close the connection."""
        self.forget()
        self._close()

    def forget(self) -> None:
        """Apply no bounds to the connection: it has a valid key, or it has ended."""
        self._strangers.remove(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _close_oldest(same: dict[Stranger, None]) -> bool:
    """Close the oldest silent connection, or else the oldest one whose bytes are all read.

    A connection with unread bytes may hold a valid key, and the next turn of the event loop reads
    it. Return False if all have such bytes.
    """
    oldest = next((each for each in same if each.is_silent()), None)
    oldest = oldest or next((each for each in same if not each.has_unread_bytes()), None)
    if oldest is None:
        return False
    oldest.close()
    return True


def network_of(peer: object) -> str:
    """Return the address of a client; of IPv6 its network, because a client has many addresses."""
    if not isinstance(peer, tuple):
        return "unknown"
    text = f"{peer[0]}".partition("%")[0]  # pyright: ignore[reportUnknownMemberType]
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return text
    if isinstance(address, ipaddress.IPv4Address):
        return text
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, IPV6_NETWORK_BITS), strict=False))


class TlsServer:
    """Accepts connections and performs their handshakes of TLS. Each counts from its start.

    asyncio's own server creates its protocols only after the handshake.
    """

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        strangers: Strangers,
        make: Callable[[Stranger], asyncio.Protocol],
    ) -> None:
        """Accept connections from now on; `make` returns the protocol of an encrypted one."""
        self._listener = listener
        self._context = context
        self._strangers = strangers
        self._make = make
        listener.setblocking(False)
        self._handshakes: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    async def _accept(self) -> None:
        """Accept connections; only cancellation ends this loop."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, peer = await loop.sock_accept(self._listener)
            except OSError as error:
                if error.errno in EXHAUSTED:
                    logger.warning("cannot accept a connection of an agent: %s", error.strerror)
                    await asyncio.sleep(PAUSE_S)
                continue
            stranger = self._strangers.add(peer, connection.fileno, connection.close)
            task = loop.create_task(self._encrypt(connection, stranger))
            stranger.close_with(task.cancel)
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _encrypt(self, connection: socket.socket, stranger: Stranger) -> None:
        """Perform the handshake; the protocol of the connection continues."""
        try:
            transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._make(stranger),
                connection,
                ssl=self._context,
                ssl_handshake_timeout=HANDSHAKE_S,
            )
        except (OSError, asyncio.CancelledError):  # No TLS, no handshake in time, or closed.
            stranger.forget()
            connection.close()
            return
        stranger.close_with(transport.abort)

    async def close(self) -> None:
        """Accept no further connection, and close those during their handshake."""
        tasks = [self._accepting, *self._handshakes]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()
