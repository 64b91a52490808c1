"""The time that environments may take in the server's own thread, and where the slow ones go."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from envhub.hosting.env_calls import Limits

logger = logging.getLogger(__name__)

INLINE_STEP_S = 0.2
MAX_SLOW = 3  # steps over the budget: one alone may be the machine's fault


class InlineBudget:
    """Who steps in the server's thread, where every step holds up all the others.

    Example: the third step of `slow` takes 0.3 s. Its new sessions are opened in workers from then
    on, its old ones go on in one thread of their own, and the log says so once.
    """

    def __init__(self, step_s: float) -> None:
        """Allow `step_s` seconds for a step."""
        self.step_s = step_s
        self._num_slow: Counter[str] = Counter()  # steps over the budget, by environment
        self._threads: dict[str, ThreadPoolExecutor] = {}  # environments expect to be alone
        self._limits: dict[tuple[str, float], Limits] = {}
        self.moved: dict[str, str] = {}  # environments that were too slow, and why

    def is_kept(self, env_name: str) -> bool:
        """Return whether the environment may step in the server's thread."""
        return env_name not in self.moved

    def limits(self, env_name: str, timeout_s: float) -> Limits:
        """Return those of an environment's calls here; one object for all its episodes."""
        limits = self._limits.get((env_name, timeout_s))
        if limits is None:
            budget_s = min(timeout_s, self.step_s)
            limits = Limits(
                env_name=env_name, timeout_s=timeout_s, budget_s=budget_s, note=self.note
            )
            self._limits[env_name, timeout_s] = limits
        return limits

    def note(self, env_name: str, took_s: float) -> None:
        """Note what a step took there."""
        if took_s <= self.step_s or env_name in self.moved:
            return
        self._num_slow[env_name] += 1
        if self._num_slow[env_name] >= MAX_SLOW:
            text = f"a step took {took_s:.2f} s; envhub.inline_step_s={self.step_s:g}"
            # Not before the request that is being answered at once has its answer.
            asyncio.get_running_loop().call_soon(self.moved.__setitem__, env_name, text)
            logger.warning("moved to worker processes env=%s: %s", env_name, text)

    def aside(self, env_name: str, work: Callable[[], Any]) -> Callable[[], Awaitable[Any]]:
        """Return what does the work in the environment's own thread."""
        thread = self._threads.get(env_name)
        if thread is None:
            thread = self._threads[env_name] = ThreadPoolExecutor(1, thread_name_prefix=env_name)
        return partial(asyncio.get_running_loop().run_in_executor, thread, work)

    def stop(self) -> None:
        """Begin nothing more; what runs is not waited for."""
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)
