"""Ports for servers that start later, in another process or again."""

import contextlib
import secrets
import socket
from pathlib import Path

FIRST = 10_000


def free_port() -> int:
    """Return a free TCP port of 127.0.0.1 below those that the system gives to other sockets."""
    given_from = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text("utf-8").split()[0])
    for port in secrets.SystemRandom().sample(range(FIRST, max(given_from, 2 * FIRST)), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError("no port is free")
