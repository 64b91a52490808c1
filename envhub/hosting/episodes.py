"""Episodes in all three places: this thread, this event loop or a worker process."""

import contextlib
import itertools
import logging
from collections.abc import Callable
from time import monotonic
from typing import Any, Protocol

from common.errors import EnvError
from envhub.env import EnvSpec, Isolation, StepResult, Style, UnknownItem, checked_reward
from envhub.errors import EnvRaised, StateUnsaved, WorkerLost
from envhub.hosting.env_calls import call_environment
from envhub.hosting.inline import InlineBudget
from envhub.hosting.saved import can_save, state_text
from envhub.hosting.worker import Worker
from envhub.hosting.worker_pool import WorkerPool

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0  # Minimum deadline of a close.

_numbers = itertools.count(1)


class HostedEpisode(Protocol):
    """The operations that a session needs from an environment. Calls of one episode never overlap.

    All but `close` raise EnvRaised and EnvTimeout; `open` also raises UnknownItem.
    """

    is_instant: bool  # A step never yields to the event loop, so it is atomic without a lock.
    worker: Worker | None  # The worker process that runs the episode; None for local episodes.
    first_state: str  # State at the start of the episode; "" if the environment has no states.
    first_messages: list[dict[str, Any]]  # See `Env`; [] if the environment has none.
    item_tools: list[dict[str, Any]]  # See `Env`; [] if all items have the environment's tools.
    can_save: bool  # The environment has the methods `save` and `load`.

    async def open(self, item_id: str, seed: int) -> str: ...
    async def step(self, action: str) -> StepResult: ...
    # Returns valid actions and the expert's action.
    async def hint(self) -> tuple[list[str], str | None]: ...
    async def render(self) -> tuple[str, str]: ...  # Returns a text for people and a fingerprint.
    async def detail(self, what: str) -> Any: ...  # See `Env`.
    async def save(self) -> str: ...  # Returns the state as JSON; also raises StateUnsaved.
    async def load(self, state: Any) -> None: ...  # See `Env`.
    async def close(self) -> None: ...


class LocalEpisode:
    """An episode in the hub's own process: INLINE steps run synchronously, TASK steps are awaited.

    If its environment turns out to be slow, the episode continues in a thread.
    """

    worker: Worker | None = None
    first_state = ""
    can_save = False

    def __init__(
        self, spec: EnvSpec, style: Style, inline: InlineBudget, *, timeout_s: float
    ) -> None:
        self._inline = inline
        self.is_instant = spec.isolation is Isolation.INLINE
        self._spec = spec
        self._style = style
        self._timeout_s = timeout_s
        self._env: Any = None
        self.first_messages: list[dict[str, Any]] = []
        self.item_tools: list[dict[str, Any]] = []

    async def open(self, item_id: str, seed: int) -> str:
        """Make the environment and begin the episode."""
        self._env = await self._call(lambda: self._spec.make(self._style))
        observation = await self._call(lambda: self._env.reset(item_id, seed))
        if hasattr(self._env, "state_text"):
            self.first_state = await self._call(self._env.state_text)
        if hasattr(self._env, "first_messages"):
            self.first_messages = await self._call(self._env.first_messages)
        if hasattr(self._env, "item_tools"):
            self.item_tools = await self._call(self._env.item_tools)
        self.can_save = can_save(self._env)
        return observation

    async def step(self, action: str) -> StepResult:
        """Perform an action, and record its duration if it runs in the server's thread."""
        began_s = monotonic()
        try:
            result = await self._call(lambda: self._env.step(action), passes=())
        finally:
            if self.is_instant:
                self._inline.note(self._spec.name, monotonic() - began_s)
        try:
            result.reward = checked_reward("reward", result.reward)
        except ValueError as error:
            raise EnvRaised(f"{self._spec.name}: {error}") from error
        return result

    async def hint(self) -> tuple[list[str], str | None]:
        valid_actions = await self._call(self._env.valid_actions)
        return valid_actions, await self._call(self._env.expert_action)

    async def render(self) -> tuple[str, str]:
        return await self._call(self._env.render), await self._call(self._env.fingerprint)

    async def detail(self, what: str) -> Any:
        """Return additional data of the environment; None if it has none."""
        detail = getattr(self._env, "detail", None)
        return None if detail is None else await self._call(lambda: detail(what))

    async def save(self) -> str:
        return state_text(await self._call(self._env.save))

    async def load(self, state: Any) -> None:
        await self._call(lambda: self._env.load(state))

    async def close(self) -> None:
        """Close the environment. A failure is only logged."""
        close = getattr(self._env, "close", None)
        if close is not None:
            try:
                await self._call(close)
            except EnvError as error:
                logger.warning("close failed env=%s reason=%s", self._spec.name, error)

    async def _call(
        self, work: Callable[[], Any], *, passes: tuple[type[Exception], ...] = (UnknownItem,)
    ) -> Any:
        """Return the result of a call, in the server's thread or in the environment's own."""
        name = self._spec.name
        if not self._inline.is_kept(name):
            self.is_instant = False
            work = self._inline.aside(name, work)
        return await call_environment(name, work, timeout_s=self._timeout_s, passes=passes)


class WorkerEpisode:
    """An episode in a worker process, which the pool assigns when it opens."""

    is_instant = False
    first_state = ""
    can_save = False

    def __init__(self, pool: WorkerPool, style: Style, *, timeout_s: float) -> None:
        self.worker: Worker | None = None
        self._pool = pool
        self._style = style
        self._timeout_s = timeout_s
        self._number = next(_numbers)
        self.first_messages: list[dict[str, Any]] = []
        self.item_tools: list[dict[str, Any]] = []

    async def open(self, item_id: str, seed: int) -> str:
        """Reserve a worker and begin the episode there."""
        self.worker = await self._pool.take()
        opened = await self._call("open", style=self._style.value, item_id=item_id, seed=seed)
        observation, self.first_state, self.first_messages, self.item_tools, self.can_save = opened
        return observation

    async def step(self, action: str) -> StepResult:
        return StepResult(**await self._call("step", action=action))

    async def hint(self) -> tuple[list[str], str | None]:
        valid_actions, expert_action = await self._call("hint")
        return valid_actions, expert_action

    async def render(self) -> tuple[str, str]:
        text, fingerprint = await self._call("render")
        return text, fingerprint

    async def detail(self, what: str) -> Any:
        return await self._call("detail", what=what)

    async def save(self) -> str:
        saved = await self._call("save")
        if "text" not in saved:
            raise StateUnsaved(saved["reason"])
        return saved["text"]

    async def load(self, state: Any) -> None:
        await self._call("load", state=state)

    async def close(self) -> None:
        """Close the environment in the worker, and free the place."""
        worker = self.worker
        self.worker = None
        if worker is None:
            return
        # A close may wait in the worker for calls of other episodes, as any other call.
        timeout_s = max(CLOSE_TIMEOUT_S, self._timeout_s)
        try:
            with contextlib.suppress(WorkerLost):
                await worker.call("close", session=self._number, timeout_s=timeout_s)
        except EnvError as error:
            logger.warning("close failed env=%s reason=%s", worker.env_name, error)
        finally:
            self._pool.give_back(worker)

    async def _call(self, op: str, **fields: object) -> Any:
        """Return the worker's answer to a call of this session."""
        assert self.worker is not None
        return await self.worker.call(op, session=self._number, timeout_s=self._timeout_s, **fields)
