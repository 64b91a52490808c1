"""Resets the TCP connections of another process, as a rebooting router does."""

import ctypes
import os
import struct
from contextlib import suppress

import psutil

PIDFD_GETFD = 438  # The number is the same on all architectures.
# A struct sockaddr with AF_UNSPEC. Connecting to it dissolves a connection.
UNSPECIFIED = struct.pack("H14x", 0)


def reset_connections(process: psutil.Process) -> int:
    """Reset the established TCP connections of a process. Both ends get an error at once.

    Returns: the number of reset connections.

    Raises: OSError: the system or its ptrace policy does not allow it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with _closing(os.pidfd_open(process.pid)) as watched:
        numbers = [
            each.fd
            for each in process.net_connections(kind="tcp")
            if each.status == psutil.CONN_ESTABLISHED and each.fd >= 0
        ]
        num_reset = 0
        for number in numbers:
            fd = libc.syscall(PIDFD_GETFD, watched, number, 0)
            if fd < 0:
                raise OSError(ctypes.get_errno(), f"pidfd_getfd of process {process.pid}")
            with _closing(fd):
                num_reset += libc.connect(fd, UNSPECIFIED, len(UNSPECIFIED)) == 0
    return num_reset


class _closing:
    """Closes a file descriptor at the end of a block."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            os.close(self._fd)
