"""A real engine with a tiny KV cache: fewer episodes while it preempts, more again after."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from actor.engine.concurrency import Concurrency, EngineLoad
from common.config.actor import ActorSection
from common.config.model import ModelSection
from tests.actor.engine.engine_rig import save_tiny_policy

if TYPE_CHECKING:  # importing vllm takes seconds, and most runs deselect these tests
    from actor.engine.engine import Engine

pytestmark = [pytest.mark.slow, pytest.mark.long]

CEILING = 24
NUM_BLOCKS = 49  # of 32 tokens, one of them vLLM's own: a short episode needs two of the others
LONG_TOKENS = 250  # a prompt of eight blocks, whose answer needs a ninth
SHORT_TOKENS = 20
ANSWER_TOKENS = 24
LOOK_S = 0.2


@pytest.fixture
def engine(tmp_path: Path) -> Iterator["tuple[asyncio.Runner, Engine]"]:
    from actor.engine.engine import Engine

    save_tiny_policy(tmp_path / "policy", is_tied=False)
    actor = ActorSection(
        max_concurrent=CEILING, max_model_len=384, kv_cache_blocks=NUM_BLOCKS, kv_cache_gib=1
    )
    model = ModelSection(path=str(tmp_path / "policy"), dtype="float32")
    with pytest.MonkeyPatch.context() as environment, asyncio.Runner() as runner:
        environment.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        engine = runner.run(
            Engine.start(model, actor, end_of_turn_ids=[], seed=0, meters_load=True)
        )
        yield runner, engine

        async def shut_down() -> None:
            engine.shut_down()

        runner.run(shut_down())


class Players:
    """Plays one-turn episodes without end, up to the concurrency limit."""

    def __init__(self, engine: "Engine", concurrency: Concurrency) -> None:
        self.prompt_tokens = LONG_TOKENS
        self._engine = engine
        self._concurrency = concurrency
        self._draw = random.Random(0)
        self._num_played = 0
        self._running: set[asyncio.Task[object]] = set()

    def fill(self) -> None:
        """Start episodes until there are as many as may be."""
        while len(self._running) < self._concurrency.limit:
            self._num_played += 1
            prompt = [self._draw.randrange(4, 260) for _ in range(self.prompt_tokens)]
            task = asyncio.create_task(
                self._engine.generate(
                    prompt,
                    request_id=f"r{self._num_played}",
                    max_tokens=ANSWER_TOKENS,
                    salt=lambda: "v0",
                )
            )
            self._running.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[object]") -> None:
        self._running.discard(task)
        if not task.cancelled():
            self.fill()

    async def look(self) -> EngineLoad:
        """Play for a while, then update the limit from the engine's load."""
        await asyncio.sleep(LOOK_S)
        assert self._engine.meter is not None
        load = self._engine.meter.drain()
        self._concurrency.adjust(load, num_episodes=len(self._running))
        self.fill()
        return load

    async def stop(self) -> None:
        for task in (running := list(self._running)):
            task.cancel()
        await asyncio.wait(running)


def test_limit_shrinks_under_preemption_and_recovers_afterwards(
    engine: "tuple[asyncio.Runner, Engine]",
) -> None:
    runner, started = engine

    async def law() -> None:
        concurrency = Concurrency(least=1, most=CEILING)
        players = Players(started, concurrency)
        players.fill()
        loads: list[EngineLoad] = []
        async with asyncio.timeout(60.0):
            while concurrency.limit > 6:  # six fit with eight blocks each, five with nine
                loads.append(await players.look())
            players.prompt_tokens = SHORT_TOKENS
            while concurrency.limit < 10:
                loads.append(await players.look())
        await players.stop()
        assert sum(load.num_preemptions for load in loads) > 0
        assert max(load.kv_frac for load in loads) > 0.9
        assert max(load.num_queued for load in loads) > 0

    runner.run(law())
