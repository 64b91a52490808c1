"""Rounds: all running episodes generate together, so that a run repeats itself bit for bit."""

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the engine takes seconds to import
    from actor.engine.engine import Completion, Engine
    from actor.rollout.env_client import HubSession


class Rounds:
    """A barrier before the engine. Used when training is synchronous.

    Example: episodes a, b, c run. a and b ask and wait; c's environment is slow. When c asks (or
    ends), the round {a, b, c} (or {a, b}) is generated in the order of episode ids, and all go on.
    """

    def __init__(self, engine: "Engine", *, max_tokens: int, exclusive: asyncio.Lock) -> None:
        self._engine = engine
        self._exclusive = exclusive
        self._max_tokens = max_tokens
        self._running: set[str] = set()
        self._waiting: dict[str, tuple[list[int], asyncio.Future[Completion]]] = {}
        self._round_number = 0
        self._round: asyncio.Task[None] | None = None

    def enter(self, episode_id: str) -> None:
        """Count an episode in. Call for all of a batch before any of them asks."""
        self._running.add(episode_id)

    def leave(self, episode_id: str) -> None:
        """Count an ended episode out; the others need not wait for it any more."""
        self._running.discard(episode_id)
        self._maybe_start()

    async def act(self, episode_id: str, prompt_ids: list[int], _: "HubSession") -> "Completion":
        """Return this episode's next turn, once everybody has asked."""
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting[episode_id] = (prompt_ids, future)
        self._maybe_start()
        return await future

    def _maybe_start(self) -> None:
        if self._waiting and self._waiting.keys() >= self._running:
            waiting, self._waiting = self._waiting, {}
            self._round = asyncio.create_task(self._generate(waiting))

    async def _generate(
        self, waiting: "dict[str, tuple[list[int], asyncio.Future[Completion]]]"
    ) -> None:
        self._round_number += 1
        prompts = {f"{self._round_number}:{name}": waiting[name][0] for name in sorted(waiting)}
        try:
            async with self._exclusive:
                completions = await self._engine.generate_together(
                    prompts, max_tokens=self._max_tokens, salt=f"v{self._engine.version}"
                )
        except Exception as e:  # noqa: BLE001 - handed to every episode of the round, which raise it
            for _, future in waiting.values():
                if not future.done():
                    future.set_exception(e)
            return
        for name, completion in completions.items():
            future = waiting[name.partition(":")[2]][1]
            if not future.done():
                future.set_result(completion)
