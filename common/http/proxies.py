"""Selects the proxy of a request: none for parts of the run, otherwise from the environment."""

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
PROXY_LOGIN = 407  # Status with which a proxy requests a user and a password.
BY_PROXY = (403, PROXY_LOGIN, 502, 503, 504)  # Statuses that a proxy may send for the server.


class ProxyFailed(OSError):
    """A request through a proxy failed. The text names the environment variable of the proxy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxy:
    """A proxy from an environment variable."""

    url: str  # Address with user and password.
    variable: str  # Name of the variable, such as "https_proxy".
    host: str  # Host of the request.

    @property
    def route(self) -> str:
        """The proxy, its variable and a remedy, for an error message."""
        return (
            f"through the proxy {without_login(self.url)} of {self.variable}; "
            f"add {self.host} to no_proxy to connect to it directly"
        )


def proxy_for(url: str, *, is_own: bool = False) -> Proxy | None:
    """Return the proxy of a request, None for a direct request.

    Requests to this machine, and to hosts in `no_proxy`, are direct. If the environment has a
    proxy, the first request to a host may resolve its name, which can block.

    Args:
        url: address of the server; http, https, ws or wss.
        is_own: whether the server is a part of the run (a hub, the scheduler, an actor). Its
            requests are always direct.

    Raises: ProxyFailed: the proxy has an unsupported kind, such as SOCKS.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    scheme = SCHEMES.get(parts.scheme, "")
    if is_own or not host or not scheme:
        return None
    variable, value = _setting(scheme, os.environ)
    if not value or _is_exempt(host) or _is_this_machine(host):
        return None
    proxy = Proxy(url=value if "://" in value else f"http://{value}", variable=variable, host=host)
    kind = proxy.url.partition("://")[0]
    if kind not in PROXY_SCHEMES:
        raise ProxyFailed(f"a proxy of the kind {kind} is not supported ({proxy.route})")
    return proxy


def route_note(url: str) -> str:
    """Return " (through the proxy ...)" for an error message, "" for a direct request."""
    proxy = proxy_for(url)
    return f" ({proxy.route})" if proxy else ""


def without_login(url: str) -> str:
    """Return an address without user and password, for logs and errors."""
    scheme, mark, rest = url.partition("://")
    return f"{scheme}{mark}{rest.rpartition('@')[2]}"


def _setting(scheme: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the proxy variable of a scheme and its value, ("", "") if none is set."""
    settings = getproxies_environment()
    for kind in (scheme, "all"):
        if value := settings.get(kind, ""):
            lower = f"{kind}_proxy"
            return (lower if environ.get(lower) else lower.upper()), value
    return "", ""


def _is_exempt(host: str) -> bool:
    """Return whether `no_proxy` contains a host, its domain or its network."""
    if proxy_bypass(host):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    networks = [each.strip() for each in getproxies_environment().get("no", "").split(",")]
    return any(_contains(network, address) for network in networks if "/" in network)


def _contains(network: str, address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Return whether a network contains an address; False for an invalid network."""
    try:
        return address in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False


@functools.lru_cache(maxsize=1024)
def _is_this_machine(host: str) -> bool:
    return is_here(host)
