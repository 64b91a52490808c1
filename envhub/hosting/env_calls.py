"""The one place that calls environments, whose code is other people's and may fail in any way."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from common.errors import EnvTimeout
from envhub.env import UnknownItem
from envhub.errors import EnvRaised

logger = logging.getLogger(__name__)


async def call_environment(
    env_name: str,
    work: Callable[[], Any],
    *,
    timeout_s: float | None = None,
    passes: tuple[type[Exception], ...] = (UnknownItem,),
) -> Any:
    """Return what `work` returns or, where that can be awaited, what comes of it.

    Args:
        timeout_s: deadline; None: there is none. What is not awaited cannot be interrupted, so
            its overrun is noticed when it returns.
        passes: exceptions that go through as they are.

    Raises:
        EnvTimeout: it took longer.
        EnvRaised: it raised anything else.
    """
    began_s = time.monotonic()
    deadline: asyncio.Timeout | None = None
    try:
        result = work()
        if hasattr(result, "__await__"):
            deadline = asyncio.timeout(timeout_s)
            async with deadline:
                return await result
    except passes:
        raise
    except Exception as error:
        if deadline is not None and deadline.expired():
            text = f"{env_name}: no answer; a call may take {timeout_s:g} s"
            raise EnvTimeout(text) from error
        logger.warning("environment raised env=%s", env_name, exc_info=True)
        raise EnvRaised(f"{env_name}: {type(error).__name__}: {error}") from error
    took_s = time.monotonic() - began_s
    if timeout_s is not None and took_s > timeout_s:
        raise EnvTimeout(f"{env_name}: took {took_s:.2f} s; a call may take {timeout_s:g} s")
    return result
