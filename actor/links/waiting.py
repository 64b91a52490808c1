"""Waits that log a warning at regular intervals."""

import asyncio
import logging
import time

logger = logging.getLogger(__name__)

WARN_EVERY_S = 10.0


async def wait_with_warnings(
    event: asyncio.Event, *, waiting_for: str, warn_every_s: float = WARN_EVERY_S
) -> None:
    """Wait for an event, and log a warning every `warn_every_s` until it is set.

    The wait has no deadline. The scheduler's silence or a signal cancels the waiting task.
    """
    started = time.monotonic()
    while not event.is_set():
        try:
            async with asyncio.timeout(warn_every_s):
                await event.wait()
        except TimeoutError:
            waited_s = time.monotonic() - started
            logger.warning("still waiting for=%r waited_s=%.1f", waiting_for, waited_s)
