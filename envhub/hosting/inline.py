"""Time budget of environments that step in the server's own thread; slow ones are moved."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

logger = logging.getLogger(__name__)

INLINE_STEP_S = 0.2
# Steps over the budget until the move; a single slow step may be a delay of the machine.
MAX_SLOW = 3


class InlineBudget:
    """Decides which environments step in the server's thread, where a step blocks all others.

    Example: the third step of `slow` takes 0.3 s. From then on its new sessions open in workers,
    its old sessions continue in one thread of their own, and the log reports the move once.
    """

    def __init__(self, step_s: float) -> None:
        """Allow `step_s` seconds for a step."""
        self.step_s = step_s
        self._num_slow: Counter[str] = Counter()  # Steps over the budget, by environment.
        # One thread per environment, since its code does not expect parallel calls.
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self.moved: dict[str, str] = {}  # Reasons why environments were moved, by name.

    def is_kept(self, env_name: str) -> bool:
        """Return whether the environment may step in the server's thread."""
        return env_name not in self.moved

    def note(self, env_name: str, took_s: float) -> None:
        """Record the duration of a step in the server's thread."""
        if took_s <= self.step_s or env_name in self.moved:
            return
        self._num_slow[env_name] += 1
        if self._num_slow[env_name] >= MAX_SLOW:
            text = f"a step took {took_s:.2f} s; envhub.inline_step_s={self.step_s:g}"
            # The move takes effect only after the current synchronous request has its answer.
            asyncio.get_running_loop().call_soon(self.moved.__setitem__, env_name, text)
            logger.warning("moved to worker processes env=%s reason=%s", env_name, text)

    def aside(self, env_name: str, work: Callable[[], Any]) -> Callable[[], Awaitable[Any]]:
        """Return a function that runs the work in the environment's own thread."""
        thread = self._threads.get(env_name)
        if thread is None:
            thread = self._threads[env_name] = ThreadPoolExecutor(1, thread_name_prefix=env_name)
        return partial(asyncio.get_running_loop().run_in_executor, thread, work)

    def stop(self) -> None:
        """Start no more work; running work is not awaited."""
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)
