"""All calls into environments. Their code is third-party and may fail in any way."""

import asyncio
import logging
from collections.abc import Callable
from time import monotonic
from typing import Any

from common.errors import EnvFailure, EnvTimeout
from common.functions.process import place_of
from envhub.env import ServiceDown, UnknownItem
from envhub.errors import EnvRaised, ServicePaused

logger = logging.getLogger(__name__)


async def call_environment(
    env_name: str,
    work: Callable[[], Any],
    *,
    timeout_s: float | None = None,
    passes: tuple[type[Exception], ...] = (UnknownItem,),
) -> Any:
    """Return the result of `work`; an awaitable result is awaited first.

    Args:
        timeout_s: deadline; None: no deadline. A synchronous call cannot be interrupted, so its
            overrun is detected when it returns.
        passes: exceptions that are re-raised unchanged.

    Raises:
        EnvTimeout: the call took longer.
        ServicePaused: the call raised ServiceDown.
        EnvRaised: the call raised any other exception.
    """
    began_s = monotonic()
    deadline: asyncio.Timeout | None = None
    try:
        result = work()
        if hasattr(result, "__await__"):
            deadline = asyncio.timeout(timeout_s)
            async with deadline:
                return await result
    except passes:
        raise
    except ServiceDown as error:
        raise ServicePaused(str(error)) from error
    except Exception as error:
        if deadline is not None and deadline.expired():
            text = f"{env_name}: no answer within {timeout_s:g} s, the limit of a call"
            raise EnvTimeout(text) from error
        raise _failure(env_name, error) from error
    took_s = monotonic() - began_s
    if timeout_s is not None and took_s > timeout_s:
        text = f"{env_name}: took {took_s:.2f} s; a call may take {timeout_s:g} s"
        raise EnvTimeout(text)
    return result


def _failure(env_name: str, error: Exception) -> EnvRaised:
    """Return an environment's exception as EnvRaised, and log it."""
    logger.warning("environment raised an error env=%s", env_name, exc_info=error)
    # An EnvFailure is deliberate: its text has the cause.
    place = "" if isinstance(error, EnvFailure) else place_of(error, caller=__file__)
    return EnvRaised(f"{env_name}: {type(error).__name__}: {error}{place}")
