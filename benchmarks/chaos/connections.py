"""Breaks the TCP connections of another process as a router that reboots does: with a reset."""

import ctypes
import os
import struct
from contextlib import suppress

import psutil

PIDFD_GETFD = 438  # the same number on all architectures
UNSPECIFIED = struct.pack("H14x", 0)  # struct sockaddr of no family: it dissolves a connection


def reset_connections(process: psutil.Process) -> int:
    """Reset the established TCP connections of a process; both ends see an error at once.

    Returns: how many there were.

    Raises: OSError: this system, or its policy for tracing, does not allow it.
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
    """Closes a file descriptor in the end."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            os.close(self._fd)
