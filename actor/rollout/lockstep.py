"""Generation in rounds: all running episodes generate together, so that a run is deterministic."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from actor.rollout.episode import Turn

if TYPE_CHECKING:  # The import takes seconds.
    from actor.engine.engine import Engine


class _PendingTurn(NamedTuple):
    """The request for one turn of an episode."""

    prompt_ids: list[int]
    seed: int


class Rounds:
    """A barrier before the engine for synchronous training.

    Example: episodes a, b, c run. a and b ask and wait, because the environment of c is slow. When
    c asks, the round {a, b, c} is generated in the order of episode ids. If c ends instead, the
    round is {a, b}. Then all episodes of the round continue.

    A round cannot wait for an episode without a session, since sessions are freed by ended episodes
    only. So an environment's episodes begin in the order of `enter`, as many at once as it has
    places. An episode whose place is used by another actor steps aside until it has a session, and
    an episode that waits for a long-lived agent until the agent asks.
    """

    def __init__(
        self,
        engine: "Engine",
        *,
        max_tokens: int,
        exclusive: asyncio.Lock,
        num_places: Callable[[str], float] = lambda _: math.inf,
    ) -> None:
        """Create the barrier without episodes.

        Args:
            num_places: returns the maximum number of concurrent sessions of an environment.
        """
        self._num_places = num_places
        self._envs: dict[str, str] = {}  # Episode id -> environment, of all that have begun.
        self._num_begun: Counter[str] = Counter()  # By environment.
        # Episode id -> its environment and its beginning, in the order of `enter`.
        self._queue: dict[str, tuple[str, asyncio.Event]] = {}
        self._engine = engine
        self._exclusive = exclusive
        self._max_tokens = max_tokens
        self._running: set[str] = set()
        self._asking: dict[str, asyncio.Lock] = {}  # Episode id -> lock of its one request.
        self._waiting: dict[str, _PendingTurn] = {}  # episode id -> its request
        self._next: asyncio.Future[asyncio.Task[dict[str, Turn]]] | None = None
        self._round_number = 0

    def enter(self, episode_id: str, *, env: str = "") -> None:
        """Add an episode. Call it for a whole batch of episodes before the first of them asks."""
        if self._has_place(env):
            self._begin(episode_id, env)
        else:
            self._queue[episode_id] = (env, asyncio.Event())

    async def begun(self, episode_id: str) -> None:
        """Wait until the environment of an episode has a place for it."""
        if episode_id in self._queue:
            await self._queue[episode_id][1].wait()

    def step_aside(self, episode_id: str) -> None:
        """Let rounds start without an episode until it asks, as it waits for other episodes."""
        self._running.discard(episode_id)
        self._maybe_start()

    def leave(self, episode_id: str) -> None:
        """Remove an ended episode, so that the round does not wait for it. Begin the next ones."""
        self._running.discard(episode_id)
        self._asking.pop(episode_id, None)
        self._queue.pop(episode_id, None)
        if episode_id in self._envs:
            self._num_begun[self._envs.pop(episode_id)] -= 1
        for name, (env, event) in list(self._queue.items()):
            if self._has_place(env):
                del self._queue[name]
                self._begin(name, env)
                event.set()
        self._maybe_start()

    def _has_place(self, env: str) -> bool:
        """Return whether an episode can begin. One always can, also if no hub serves it now."""
        return self._num_begun[env] < max(1, self._num_places(env))

    def _begin(self, episode_id: str, env: str) -> None:
        """Let the rounds wait for an episode."""
        self._envs[episode_id] = env
        self._num_begun[env] += 1
        self._running.add(episode_id)

    async def act(self, episode_id: str, prompt_ids: list[int], *, seed: int) -> Turn:
        """Return this episode's next turn, sampled with `seed`, once all episodes have asked.

        Further requests of the episode wait for the following rounds.
        """
        async with self._asking.setdefault(episode_id, asyncio.Lock()):
            return await self._act(episode_id, prompt_ids, seed=seed)

    async def _act(self, episode_id: str, prompt_ids: list[int], *, seed: int) -> Turn:
        """Return the turn of an episode that has no other request."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        started = self._next
        asked = time.monotonic()
        self._running.add(episode_id)  # It may have stepped aside.
        self._waiting[episode_id] = _PendingTurn(prompt_ids, seed)
        self._maybe_start()
        # Shielded: a revoked episode must not cancel the round of the remaining episodes.
        generating = await asyncio.shield(started)
        waited_s = time.monotonic() - asked
        turns = await asyncio.shield(generating)
        return replace(turns[episode_id], waited_s=waited_s)

    def _maybe_start(self) -> None:
        """Start the next round if all running episodes wait for their turn."""
        if self._next is not None and self._waiting.keys() >= self._running:
            waiting = self._waiting
            self._waiting = {}
            started = self._next
            self._next = None
            started.set_result(asyncio.create_task(self._generate(waiting)))

    async def _generate(self, asked: dict[str, _PendingTurn]) -> dict[str, Turn]:
        """Return the turn of each episode. An engine failure propagates to all waiting episodes."""
        self._round_number += 1
        by_request = {f"{self._round_number}:{name}": asked[name] for name in sorted(asked)}
        async with self._exclusive:
            turns = await self._engine.generate_together(
                {request: each.prompt_ids for request, each in by_request.items()},
                max_tokens=self._max_tokens,
                salt=lambda: f"v{self._engine.version}",
                seeds={request: each.seed for request, each in by_request.items()},
            )
        return {name.partition(":")[2]: each for name, each in turns.items()}
