"""HTTP clients for asyncio, each for the requests to one server."""

from typing import Any

import aiohttp

from common.http.proxies import proxy_for


def open_session(url: str, *, is_own: bool = False, **options: Any) -> aiohttp.ClientSession:
    """Return an aiohttp session for the requests to one server.

    Args:
        url: address of the server, which determines the proxy, see `proxy_for`.
        is_own: whether the server is a part of the run.
        options: arguments of `aiohttp.ClientSession`.

    Raises: ProxyFailed: the proxy of the environment has an unsupported kind.
    """
    proxy = proxy_for(url, is_own=is_own)
    return aiohttp.ClientSession(proxy=proxy.url if proxy else None, **options)


def open_httpx(package: Any, url: str, **options: Any) -> Any:
    """Return an `AsyncClient` of httpx, or of a compatible package, for requests to one server.

    Raises: ProxyFailed: the proxy of the environment has an unsupported kind.
    """
    proxy = proxy_for(url)
    return package.AsyncClient(proxy=proxy.url if proxy else None, trust_env=False, **options)
