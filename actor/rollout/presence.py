"""Whether a hub is there, and being there for it: the sessions of a process that is gone end."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from urllib.parse import quote

import aiohttp

PROBE_S = 2.0  # for a hub to answer anything
STAY_S = 30.0  # between two signs of a hub that an owner stays at
AGAIN_S = 0.25
MAX_SIGNS = 2_000  # that are remembered: those of a quarter of an hour
SILENT_S = 3.0  # without a sign of a hub that gives two a second: it stands still


class Signs:
    """When a hub that one stays at gave signs of life; some hubs give none."""

    def __init__(self) -> None:
        self._heard_at: deque[float] = deque(maxlen=MAX_SIGNS)

    def hear(self) -> None:
        """Note a sign."""
        self._heard_at.append(time.monotonic())

    def are_missing(self, *, within_s: float) -> bool:
        """Return whether the hub stands still, or did for most of the last `within_s`: then no step
        that has waited for so long is to blame, also not if it goes on just before that is up."""
        if not self._heard_at:
            return False
        now, limit_s = time.monotonic(), min(SILENT_S, within_s)
        silences = pairwise(max(at, now - within_s) for at in self._heard_at)
        longest_s = max((end - start for start, end in silences), default=0.0)
        stands_still = now - self._heard_at[-1] >= limit_s
        return stands_still or longest_s >= max(limit_s, within_s / 2)


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
