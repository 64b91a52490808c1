"""Which proxy a request takes: none to the run's own parts, else the environment's."""

import functools
import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit
from urllib.request import getproxies_environment, proxy_bypass

from common.wire.addresses import is_here

SCHEMES = {"http": "http", "https": "https", "ws": "http", "wss": "https"}
PROXY_SCHEMES = ("http", "https")
PROXY_LOGIN = 407  # The status by which a proxy asks for a user and a password.
BY_PROXY = (403, PROXY_LOGIN, 502, 503, 504)  # Statuses that a proxy gives in the server's place.


class ProxyFailed(OSError):
    """A request through a proxy failed; the text names the variable that names the proxy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxy:
    """A proxy that a variable of the environment names."""

    url: str  # with user and password
    variable: str  # such as "https_proxy"
    host: str  # of the request

    @property
    def route(self) -> str:
        """The proxy, its variable and the remedy, for the text of an error."""
        return (
            f"through the proxy {without_login(self.url)} of {self.variable}; "
            f"add {self.host} to no_proxy if it is reached directly"
        )


def proxy_for(url: str, *, is_own: bool = False) -> Proxy | None:
    """Return the proxy of a request, None if it goes directly.

    Requests to this machine go directly, and so do those that `no_proxy` exempts. With a proxy in
    the environment the host's name may be resolved, once, which can take the resolver's time.

    Args:
        url: of the server; http, https, ws or wss.
        is_own: whether the server is a part of the run (a hub, the scheduler, an actor): no proxy,
            wherever it is.

    Raises: ProxyFailed: the variable names a proxy of another kind, such as SOCKS.
    """
    parts = urlsplit(url)
    host, scheme = parts.hostname or "", SCHEMES.get(parts.scheme, "")
    if is_own or not host or not scheme:
        return None
    variable, value = _setting(scheme, os.environ)
    if not value or _is_exempt(host) or _is_this_machine(host):
        return None
    found = Proxy(url=value if "://" in value else f"http://{value}", variable=variable, host=host)
    kind = found.url.partition("://")[0]
    if kind not in PROXY_SCHEMES:
        raise ProxyFailed(f"a proxy of the kind {kind} is not supported ({found.route})")
    return found


def route_note(url: str) -> str:
    """Return " (through the proxy ...)" for the text of an error, "" for a direct request."""
    proxy = proxy_for(url)
    return f" ({proxy.route})" if proxy else ""


def without_login(url: str) -> str:
    """Return an address as it may be shown: without user and password."""
    scheme, mark, rest = url.partition("://")
    return f"{scheme}{mark}{rest.rpartition('@')[2]}"


def _setting(scheme: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the variable that counts for a scheme, and its value; ("", "") if there is none."""
    known = getproxies_environment()
    for kind in (scheme, "all"):
        if value := known.get(kind, ""):
            lower = f"{kind}_proxy"
            return (lower if environ.get(lower) else lower.upper()), value
    return "", ""


def _is_exempt(host: str) -> bool:
    """Return whether `no_proxy` names a host, its domain or its network."""
    if proxy_bypass(host):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    networks = [each.strip() for each in getproxies_environment().get("no", "").split(",")]
    return any(_holds(network, address) for network in networks if "/" in network)


def _holds(network: str, address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    try:
        return address in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False


@functools.lru_cache(maxsize=1024)
def _is_this_machine(host: str) -> bool:
    return is_here(host)
