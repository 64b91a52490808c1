"""The loopback address of this machine: 127.0.0.1, or ::1 on a machine without IPv4."""

import functools
import socket

IPV4 = "127.0.0.1"
IPV6 = "::1"


@functools.cache
def loopback() -> str:
    """Return the address on which the processes of this machine reach each other."""
    if not can_bind(IPV4) and can_bind(IPV6):
        return IPV6
    return IPV4


def can_bind(host: str) -> bool:
    """Return whether a program can listen at an IP address of this machine."""
    try:
        with socket.socket(family_of(host), socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True


def family_of(host: str) -> socket.AddressFamily:
    """Return the address family of an IP address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET
