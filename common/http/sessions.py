"""Clients for event loops, each for the requests to one server."""

from typing import Any

import aiohttp

from common.http.proxies import proxy_for


def open_session(url: str, *, is_own: bool = False, **options: Any) -> aiohttp.ClientSession:
    """Return a session of aiohttp for the requests to one server.

    Args:
        url: of the server; it decides on the proxy, see `proxy_for`.
        is_own: whether the server is a part of the run.
        options: of `aiohttp.ClientSession`.

    Raises: ProxyFailed: the proxy that the environment names is of an unknown kind.
    """
    proxy = proxy_for(url, is_own=is_own)
    return aiohttp.ClientSession(proxy=proxy.url if proxy else None, **options)


def open_httpx(package: Any, url: str, **options: Any) -> Any:
    """Return an `AsyncClient` of httpx, or of a package like it, for the requests to one server.

    Raises: ProxyFailed: the proxy that the environment names is of an unknown kind.
    """
    proxy = proxy_for(url)
    return package.AsyncClient(proxy=proxy.url if proxy else None, trust_env=False, **options)
