"""Proxy variables for child processes whose HTTP clients are not the product's."""

import os
from collections.abc import Mapping

VARIABLES = ("http_proxy", "https_proxy", "all_proxy")
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def names_a_proxy(environ: Mapping[str, str]) -> bool:
    """Return whether a variable names a proxy, in lower or upper case."""
    return any(environ.get(name) or environ.get(name.upper()) for name in VARIABLES)


def direct_loopback(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `no_proxy` and `NO_PROXY` with the loopback addresses added to both.

    Clients differ in which of the two they read. {} if no variable names a proxy.
    """
    if not names_a_proxy(environ):
        return {}
    known = f"{environ.get('no_proxy', '')},{environ.get('NO_PROXY', '')}".split(",")
    hosts = dict.fromkeys(filter(None, [*(each.strip() for each in known), *LOOPBACK]))
    return dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join(hosts))


def keep_loopback_direct() -> None:
    """Exempt the loopback addresses from the proxies of this process and of its children.

    The product's own clients need no exemption; libraries with clients of their own do.
    """
    os.environ.update(direct_loopback(os.environ))
