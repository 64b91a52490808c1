"""All calls into environments. Their code is third-party and may fail in any way."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from time import monotonic
from typing import Any, TypeVar

from common.errors import EnvTimeout
from envhub.env import UnknownItem
from envhub.errors import EnvRaised

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """Time limits of one environment's synchronous calls.

    `note` is called with the duration of each call that exceeds `budget_s` or fails.
    """

    env_name: str
    timeout_s: float
    budget_s: float
    note: Callable[[str, float], None]


def call_at_once(work: Callable[[str], Any], text: str, limits: CallLimits) -> tuple[Any, float]:
    """Return the result of `work(text)` and its seconds. Raises as `call_environment`."""
    began_s = monotonic()
    try:
        result = work(text)
    except Exception as error:
        limits.note(limits.env_name, monotonic() - began_s)
        raise _failure(limits.env_name, error) from error
    took_s = monotonic() - began_s
    if took_s > limits.budget_s:
        limits.note(limits.env_name, took_s)
        if took_s > limits.timeout_s:
            raise _overrun(limits.env_name, took_s, limits.timeout_s)
    return result, took_s


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
    except Exception as error:
        if deadline is not None and deadline.expired():
            text = f"{env_name}: no answer within {timeout_s:g} s, the limit of a call"
            raise EnvTimeout(text) from error
        raise _failure(env_name, error) from error
    took_s = monotonic() - began_s
    if timeout_s is not None and took_s > timeout_s:
        raise _overrun(env_name, took_s, timeout_s)
    return result


def done_at_once(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never waits. Raises: RuntimeError: it waited."""
    try:
        work.send(None)
    except StopIteration as error:
        return error.value
    work.close()
    raise RuntimeError("a call that must return at once had to wait")


def _failure(env_name: str, error: Exception) -> EnvRaised:
    logger.warning("environment raised an error env=%s", env_name, exc_info=error)
    return EnvRaised(f"{env_name}: {type(error).__name__}: {error}")


def _overrun(env_name: str, took_s: float, timeout_s: float) -> EnvTimeout:
    return EnvTimeout(f"{env_name}: a call took {took_s:.2f} s; the limit is {timeout_s:g} s")
