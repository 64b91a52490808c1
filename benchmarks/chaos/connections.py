"""Resets the TCP connections of another process, as a rebooting router does."""

import ctypes
import os
import struct
from contextlib import ExitStack

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
    num_reset = 0
    with ExitStack() as stack:
        watched = os.pidfd_open(process.pid)
        stack.callback(os.close, watched)
        for each in process.net_connections(kind="tcp"):
            if each.status != psutil.CONN_ESTABLISHED or each.fd < 0:
                continue
            fd = libc.syscall(PIDFD_GETFD, watched, each.fd, 0)
            if fd < 0:
                raise OSError(ctypes.get_errno(), f"pidfd_getfd of process {process.pid}")
            stack.callback(os.close, fd)
            num_reset += libc.connect(fd, UNSPECIFIED, len(UNSPECIFIED)) == 0
    return num_reset
