"""One live episode, wherever it lives: in this thread, in this event loop or in a worker."""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Any, Protocol, TypeVar

from envhub.env import EnvSpec, StepResult, Style, UnknownItem
from envhub.errors import EnvRaised, EnvTimeout, WorkerLost
from envhub.workers import Worker, WorkerPool

logger = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_TIMEOUT_S = 5.0
NUM_SHADOW_TRIES = 2  # the second where another episode's fault ended the copy's worker

_numbers = itertools.count(1)


class Episode(Protocol):
    """What a session does with its environment. Calls of one episode come one at a time.

    Attributes:
        is_instant: a step never gives way to others, so that it is atomic without a lock.
        hints_apart: hints are asked of a copy, whose failure is none of the episode.
        worker: the worker process it lives in, if it lives in one.
    """

    is_instant: bool
    hints_apart: bool
    worker: Worker | None

    async def open(self, item_id: str, seed: int) -> str:
        """Starts the episode. Raises: UnknownItem, EnvRaised, EnvTimeout."""
        ...

    async def step(self, action: str) -> StepResult:
        """Performs an action. Raises: EnvRaised, EnvTimeout."""
        ...

    async def hint(self) -> tuple[list[str], str | None]:
        """Returns valid actions and the expert's. Raises: EnvRaised, EnvTimeout."""
        ...

    async def render(self) -> tuple[str, str]:
        """Returns the state for people and the fingerprint. Raises: EnvRaised, EnvTimeout."""
        ...

    async def close(self) -> None:
        """Gives everything back; never raises."""
        ...


class LocalEpisode:
    """An episode in the hub's own process.

    INLINE environments answer at once. TASK ones are awaited under a deadline; an inline call
    that overruns cannot be interrupted and is noticed when it returns.
    """

    hints_apart = False
    worker: Worker | None = None

    def __init__(self, spec: EnvSpec, style: Style, *, timeout_s: float, is_instant: bool) -> None:
        self.is_instant = is_instant
        self._name = spec.name
        self._timeout_s = timeout_s
        self._env: Any = self._attempt(lambda: spec.make(style))

    async def open(self, item_id: str, seed: int) -> str:
        return await self._call(lambda: self._env.reset(item_id, seed))

    async def step(self, action: str) -> StepResult:
        return await self._call(lambda: self._env.step(action))

    async def hint(self) -> tuple[list[str], str | None]:
        valid_actions = await self._call(self._env.valid_actions)
        return valid_actions, await self._call(self._env.expert_action)

    async def render(self) -> tuple[str, str]:
        return await self._call(self._env.render), await self._call(self._env.fingerprint)

    async def close(self) -> None:
        close = getattr(self._env, "close", None)
        if close is not None:
            try:
                await self._call(close)
            except (EnvRaised, EnvTimeout) as error:
                logger.warning("close failed env=%s reason=%s", self._name, error)

    async def _call(self, work: Callable[[], Any]) -> Any:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        result = self._attempt(work)
        if isawaitable(result):
            return await self._wait(result)
        if loop.time() - began_s > self._timeout_s:
            raise EnvTimeout(f"{self._name}: took {loop.time() - began_s:.2f} s{self._limit()}")
        return result

    def _attempt(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except UnknownItem:
            raise
        except Exception as error:
            logger.exception("environment raised env=%s", self._name)
            raise self._raised(error) from error

    async def _wait(self, result: Awaitable[T]) -> T:
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                return await result
        except UnknownItem:
            raise
        except Exception as error:
            if deadline.expired():
                raise EnvTimeout(f"{self._name}: no answer{self._limit()}") from error
            logger.warning("environment raised env=%s", self._name, exc_info=True)
            raise self._raised(error) from error

    def _raised(self, error: Exception) -> EnvRaised:
        return EnvRaised(f"{self._name}: {type(error).__name__}: {error}")

    def _limit(self) -> str:
        return f"; a call may take {self._timeout_s:g} s"


class WorkerEpisode:
    """An episode in a worker process."""

    is_instant = False
    hints_apart = False

    def __init__(self, pool: WorkerPool, style: Style, *, timeout_s: float) -> None:
        self.worker: Worker | None = None
        self._pool = pool
        self._style = style
        self._timeout_s = timeout_s
        self._number = next(_numbers)

    async def open(self, item_id: str, seed: int) -> str:
        self.worker = await self._pool.take()
        start = {"style": self._style.value, "item_id": item_id, "seed": seed}
        return await self._call("open", **start)

    async def step(self, action: str) -> StepResult:
        return StepResult(**await self._call("step", action=action))

    async def hint(self) -> tuple[list[str], str | None]:
        return await self.hint_after([])

    async def hint_after(self, actions: list[str]) -> tuple[list[str], str | None]:
        """Performs actions, then returns the hint."""
        valid_actions, expert_action = await self._call("hint", actions=actions)
        return valid_actions, expert_action

    async def render(self) -> tuple[str, str]:
        text, fingerprint = await self._call("render")
        return text, fingerprint

    async def close(self) -> None:
        worker, self.worker = self.worker, None
        if worker is None:
            return
        try:
            await worker.call("close", session=self._number, timeout_s=CLOSE_TIMEOUT_S)
        except WorkerLost:
            pass
        except (EnvRaised, EnvTimeout) as error:
            logger.warning("close failed env=%s reason=%s", worker.env_name, error)
        finally:
            self._pool.give_back(worker)

    async def _call(self, op: str, **fields: object) -> Any:
        assert self.worker is not None
        return await self.worker.call(op, session=self._number, timeout_s=self._timeout_s, **fields)


class ShadowedEpisode:
    """An episode in this process whose expert, which may hang, is asked of a copy in a worker.

    The copy is made at the first hint and brought up to date with the same actions. When it
    hangs only the copy ends; at that same state the hint is then refused without trying again.

    Example: step a, step b, hint: the copy resets, performs a and b and answers. Step c, hint:
    it performs c. Its worker is killed; hint: a new copy performs a, b and c.
    """

    is_instant = True
    hints_apart = True
    worker: Worker | None = None

    def __init__(
        self, episode: LocalEpisode, make_copy: Callable[[], WorkerEpisode], *, name: str
    ) -> None:
        self._episode = episode
        self._make_copy = make_copy
        self._name = name
        self._copy: WorkerEpisode | None = None
        self._num_copied = 0
        self._start: tuple[str, int] = ("", 0)
        self._actions: list[str] = []
        self._hang: tuple[int, str] | None = None  # number of actions, what was said then
        self._lock = asyncio.Lock()
        self._is_closed = False

    async def open(self, item_id: str, seed: int) -> str:
        self._start = (item_id, seed)
        return await self._episode.open(item_id, seed)

    async def step(self, action: str) -> StepResult:
        result = await self._episode.step(action)
        self._actions.append(action)
        return result

    async def hint(self) -> tuple[list[str], str | None]:
        async with self._lock:
            try:
                for _ in range(NUM_SHADOW_TRIES - 1):
                    with contextlib.suppress(WorkerLost):
                        return await self._ask()
                return await self._ask()
            finally:
                if self._is_closed:
                    await self._drop_copy()

    async def _ask(self) -> tuple[list[str], str | None]:
        num_actions = len(self._actions)
        if self._hang is not None and self._hang[0] == num_actions:
            raise EnvTimeout(self._hang[1])
        try:
            if self._copy is None:
                self._copy, self._num_copied = self._make_copy(), 0
                await self._copy.open(*self._start)
            hint = await self._copy.hint_after(self._actions[self._num_copied : num_actions])
        except (EnvRaised, EnvTimeout) as error:
            await self._drop_copy()
            if isinstance(error, EnvTimeout):
                text = f"{self._name}: the expert does not answer here; the session lives ({error})"
                self._hang = (num_actions, text)
                raise EnvTimeout(text) from error
            raise
        self._num_copied = num_actions
        return hint

    async def _drop_copy(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            await copy.close()

    async def render(self) -> tuple[str, str]:
        return await self._episode.render()

    async def close(self) -> None:
        self._is_closed = True
        await self._episode.close()
        if not self._lock.locked():
            await self._drop_copy()
