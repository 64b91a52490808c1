"""Whether a hub is there, and being there for it: the sessions of a process that is gone end."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from urllib.parse import quote

import aiohttp

PROBE_S = 2.0  # for a hub to answer anything
STAY_S = 30.0  # between two signs of a hub that an owner stays at
AGAIN_S = 0.25
SILENT_S = 3.0  # without a sign of a hub that gives two a second: it stands still


class Signs:
    """When a hub that one stays at last gave a sign of life; some hubs give none."""

    def __init__(self) -> None:
        self._heard_at: float | None = None

    def hear(self) -> None:
        """Note a sign."""
        self._heard_at = time.monotonic()

    def are_missing(self, *, within_s: float) -> bool:
        """Return whether the hub stood still all the time, lately: then no step is to blame."""
        limit_s = min(SILENT_S, within_s)
        return self._heard_at is not None and time.monotonic() - self._heard_at >= limit_s


async def answers(http: aiohttp.ClientSession, url: str) -> bool:
    """Return whether somebody answers at a hub's address, soon."""
    timeout = aiohttp.ClientTimeout(total=PROBE_S)
    try:
        async with http.get(f"{url}/healthz", timeout=timeout):
            return True
    except (aiohttp.ClientError, TimeoutError):
        return False


async def stay(
    http: aiohttp.ClientSession, url: str, owner: str, on_sign: Callable[[], object]
) -> None:
    """Be there for the sessions of an owner, until cancelled or the hub does not ask for it.

    When a process is killed its connection closes, and the hub closes the owner's sessions.

    Args:
        on_sign: called for each sign of life of the hub, which gives two a second.
    """
    path = f"{url}/v1/presence/{quote(owner, safe='')}"
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=PROBE_S, sock_read=STAY_S)
    while True:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with http.get(path, timeout=timeout) as response:
                if response.status == 404:
                    return
                async for _ in response.content.iter_any():
                    on_sign()
        await asyncio.sleep(AGAIN_S)
