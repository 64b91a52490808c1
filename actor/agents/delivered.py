"""Whether a client has received the bytes of an answer, as the operating system reports it."""

import asyncio
import fcntl
import os
import socket
import struct
import termios

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
