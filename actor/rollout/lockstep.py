"""Rounds: all running episodes generate together, so that a run repeats itself bit for bit."""

import asyncio
import hashlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from actor.rollout.episode import Turn

if TYPE_CHECKING:  # it takes seconds to import
    from actor.engine.engine import Engine


class Rounds:
    """A barrier before the engine. Used when training is synchronous.

    Example: episodes a, b, c run. a and b ask and wait; c's environment is slow. When c asks (or
    ends), the round {a, b, c} (or {a, b}) is generated in the order of episode ids, and all go on.
    """

    def __init__(
        self, engine: "Engine", *, max_tokens: int, exclusive: asyncio.Lock, seed: int
    ) -> None:
        """Make one without episodes; `seed` is the run's."""
        self._engine = engine
        self._seed = seed
        self._turns: dict[str, int] = {}  # episode -> turns asked for
        self._exclusive = exclusive
        self._max_tokens = max_tokens
        self._running: set[str] = set()
        self._waiting: dict[str, list[int]] = {}  # episode -> its prompt
        self._next: asyncio.Future[asyncio.Task[dict[str, Turn]]] | None = None
        self._round_number = 0

    def enter(self, episode_id: str) -> None:
        """Count an episode in. Call for all of a batch before any of them asks."""
        self._running.add(episode_id)
        self._turns[episode_id] = 0  # one that is issued again begins again

    def leave(self, episode_id: str) -> None:
        """Count an ended episode out; the others need not wait for it any more."""
        self._running.discard(episode_id)
        self._turns.pop(episode_id, None)
        self._maybe_start()

    async def act(self, episode_id: str, prompt_ids: list[int]) -> Turn:
        """Return this episode's next turn, once everybody has asked."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        started, asked = self._next, time.monotonic()
        self._waiting[episode_id] = prompt_ids
        self._maybe_start()
        # Shielded, because an episode that is revoked must not end the round of the others.
        generating = await asyncio.shield(started)
        waited_s = time.monotonic() - asked
        turns = await asyncio.shield(generating)
        return replace(turns[episode_id], waited_s=waited_s)

    def _maybe_start(self) -> None:
        if self._next is not None and self._waiting.keys() >= self._running:
            waiting, self._waiting = self._waiting, {}
            started, self._next = self._next, None
            started.set_result(asyncio.create_task(self._generate(waiting)))

    async def _generate(self, prompts: dict[str, list[int]]) -> dict[str, Turn]:
        """Return every episode's turn. A failure of the engine reaches all that wait for it."""
        self._round_number += 1
        by_request = {f"{self._round_number}:{name}": prompts[name] for name in sorted(prompts)}
        seeds = {request: self._next_seed(request.partition(":")[2]) for request in by_request}
        async with self._exclusive:
            turns = await self._engine.generate_together(
                by_request,
                max_tokens=self._max_tokens,
                salt=f"v{self._engine.version}",
                seeds=seeds,
            )
        return {name.partition(":")[2]: each for name, each in turns.items()}

    def _next_seed(self, episode_id: str) -> int:
        """Return the seed of an episode's next turn: the same in whatever life of the engine."""
        turn = self._turns.get(episode_id, 0)
        self._turns[episode_id] = turn + 1
        return sampling_seed(self._seed, episode_id, turn)


def sampling_seed(run_seed: int, episode_id: str, turn: int) -> int:
    """Return 63 bits that are this turn's alone."""
    text = f"{run_seed}/{episode_id}/{turn}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
