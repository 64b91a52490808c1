"""The loopback address of this machine, 127.0.0.1 or ::1, and its exemption from proxies."""

import functools
import os
import socket
from collections.abc import Mapping

VARIABLES = ("http_proxy", "https_proxy", "all_proxy")
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def names_a_proxy(environ: Mapping[str, str]) -> bool:
    """Return whether a proxy variable is set, in lower or upper case."""
    return any(environ.get(name) or environ.get(name.upper()) for name in VARIABLES)


def direct_loopback(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `no_proxy` and `NO_PROXY` with the loopback addresses added; {} without a proxy.

    Some clients read the one variable, some the other.
    """
    if not names_a_proxy(environ):
        return {}
    exempt = f"{environ.get('no_proxy', '')},{environ.get('NO_PROXY', '')}".split(",")
    hosts = dict.fromkeys(filter(None, [*(each.strip() for each in exempt), *LOOPBACK]))
    return dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join(hosts))


def keep_loopback_direct() -> None:
    """Exempt the loopback addresses from the proxies of this process and of its children.

    Only libraries with their own HTTP clients need this exemption.
    """
    os.environ.update(direct_loopback(os.environ))


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
