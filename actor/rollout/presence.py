"""Hub liveness: health probes, and the keep-alive connection that owns this process's sessions."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from urllib.parse import quote

import aiohttp

PROBE_S = 2.0  # Seconds for a hub to answer a probe.
STAY_S = 30.0  # Longest silence, in seconds, on a keep-alive connection.
AGAIN_S = 0.25
MAX_SIGNS = 2_000  # Number of remembered signs, about a quarter of an hour.
# Seconds without a sign after which a hub that sends two a second counts as suspended.
SILENT_S = 3.0


class LifeSigns:
    """Times at which a hub sent signs of life on the keep-alive connection. Some hubs send none."""

    def __init__(self) -> None:
        self._heard_at: deque[float] = deque(maxlen=MAX_SIGNS)

    def hear(self) -> None:
        """Record a sign of life."""
        self._heard_at.append(time.monotonic())

    def are_missing(self, *, within_s: float) -> bool:
        """Return whether the hub is suspended, or was for at least half of the last `within_s`.

        Then a step that timed out in that time is not at fault, even if the hub resumed before the
        timeout.
        """
        if not self._heard_at:
            return False
        now = time.monotonic()
        limit_s = min(SILENT_S, within_s)
        silences = pairwise(max(at, now - within_s) for at in self._heard_at)
        longest_s = max((end - start for start, end in silences), default=0.0)
        stands_still = now - self._heard_at[-1] >= limit_s
        return stands_still or longest_s >= max(limit_s, within_s / 2)


async def answers(http: aiohttp.ClientSession, url: str) -> bool:
    """Return whether a server answers at the hub's address within `PROBE_S`."""
    timeout = aiohttp.ClientTimeout(total=PROBE_S)
    try:
        async with http.get(f"{url}/healthz", timeout=timeout):
            return True
    except (aiohttp.ClientError, TimeoutError):
        return False


async def stay(
    http: aiohttp.ClientSession, url: str, owner: str, on_sign: Callable[[], object]
) -> None:
    """Hold the owner's keep-alive connection until cancelled or the hub has no such route.

    The connection closes when the process is killed, and the hub then closes the owner's sessions.

    Args:
        on_sign: called for each sign of life; the hub sends two a second.
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
