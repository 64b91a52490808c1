"""A DEALER that reconnects to its peer when the peer's address changes."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import zmq

from common.errors import PeerMissing
from common.wire.addresses import Addresses
from common.wire.codec import decode, encode, in_version
from common.wire.messages import SCHEMA_VERSION
from common.wire.security import RunKeys
from common.wire.sockets import connect_dealer
from common.wire.versions import accepted_version

logger = logging.getLogger(__name__)

POLL_S = 0.05  # Seconds between two polls for an address that is not known yet.
ASLEEP_S = 1.0  # A longer gap between two polls means that this process was suspended.


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
