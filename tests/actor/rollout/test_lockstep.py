"""Laws of rounds."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from actor.rollout.episode import Turn
from actor.rollout.lockstep import Rounds
from common.errors import EngineError


class EchoEngine:
    """Answers every prompt with itself and notes the rounds."""

    def __init__(self, error: Exception | None = None) -> None:
        self.version = 3
        self.rounds: list[dict[str, list[int]]] = []
        self.salts: list[str] = []
        self.seeds: dict[str, int] = {}
        self._error = error

    async def generate_together(
        self,
        prompts: dict[str, list[int]],
        *,
        max_tokens: int,
        salt: Callable[[], str],
        seeds: dict[str, int],
    ) -> dict[str, Turn]:
        assert max_tokens == 16
        self.seeds |= seeds
        self.rounds.append(prompts)
        self.salts.append(salt())
        await asyncio.sleep(0)
        if self._error is not None:
            raise self._error
        return {request_id: Turn(ids, [], []) for request_id, ids in prompts.items()}


def make_rounds(engine: EchoEngine, *names: str, exclusive: Any = None) -> Rounds:
    lock = exclusive or asyncio.Lock()
    rounds = Rounds(engine, max_tokens=16, exclusive=lock)  # type: ignore[arg-type]
    for name in names:
        rounds.enter(name)
    return rounds


def ask(rounds: Rounds, name: str, *ids: int, seed: int = 0) -> asyncio.Task[Any]:
    return asyncio.create_task(rounds.act(name, list(ids), seed=seed))


async def settle() -> None:
    """Let everything that can run, run."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_round_waits_for_all_and_sorts_ids() -> None:
    async def law() -> None:
        engine = EchoEngine()
        rounds = make_rounds(engine, "a", "b", "c")
        late, early = ask(rounds, "c", 3), ask(rounds, "a", 1)
        await settle()
        assert engine.rounds == []
        last = ask(rounds, "b", 2)
        assert [(await task).token_ids for task in (early, last, late)] == [[1], [2], [3]]
        assert [list(r.items()) for r in engine.rounds] == [
            [("1:a", [1]), ("1:b", [2]), ("1:c", [3])]
        ]
        assert engine.salts == ["v3"]

    asyncio.run(law())


def test_round_starts_when_last_missing_member_leaves() -> None:
    async def law() -> None:
        engine = EchoEngine()
        rounds = make_rounds(engine, "a", "b")
        task = ask(rounds, "a", 1)
        await settle()
        assert engine.rounds == []
        rounds.leave("b")
        assert (await task).token_ids == [1]
        again = ask(rounds, "a", 1, 1)
        assert (await again).token_ids == [1, 1]
        assert [list(r) for r in engine.rounds] == [["1:a"], ["2:a"]]

    asyncio.run(law())


def test_leaving_an_idle_round_starts_nothing() -> None:
    async def law() -> None:
        engine = EchoEngine()
        rounds = make_rounds(engine, "a", "b")
        rounds.leave("a")
        rounds.leave("a")
        await settle()
        assert engine.rounds == []
        assert (await ask(rounds, "b", 2)).token_ids == [2]

    asyncio.run(law())


def test_failure_reaches_every_episode_of_the_round() -> None:
    async def law() -> None:
        rounds = make_rounds(EchoEngine(EngineError("dead")), "a", "b")
        tasks = [ask(rounds, "a", 1), ask(rounds, "b", 2)]
        for task in tasks:
            with pytest.raises(EngineError, match="dead"):
                await task

    asyncio.run(law())


def test_revoked_episode_does_not_block_the_round() -> None:
    async def law() -> None:
        rounds = make_rounds(EchoEngine(), "a", "b", "c")
        revoked, other = ask(rounds, "a", 1), ask(rounds, "b", 2)
        await settle()
        revoked.cancel()
        await settle()
        rounds.leave("a")
        last = ask(rounds, "c", 3)
        assert (await other).token_ids == [2]
        assert (await last).token_ids == [3]

    asyncio.run(law())


def test_round_waits_while_weights_are_loaded() -> None:
    async def law() -> None:
        engine, exclusive = EchoEngine(), asyncio.Lock()
        rounds = make_rounds(engine, "a", exclusive=exclusive)
        async with exclusive:
            task = ask(rounds, "a", 1)
            await settle()
            assert engine.rounds == []
            engine.version = 4
        await task
        assert engine.salts == ["v4"]

    asyncio.run(law())


def test_each_round_turn_uses_its_own_seed() -> None:
    async def law() -> None:
        engine = EchoEngine()
        rounds = make_rounds(engine, "a", "b")
        await asyncio.gather(ask(rounds, "a", 1, seed=7), ask(rounds, "b", 2, seed=9))
        await asyncio.gather(ask(rounds, "b", 2, seed=5), ask(rounds, "a", 1, seed=8))
        assert engine.seeds == {"1:a": 7, "1:b": 9, "2:a": 8, "2:b": 5}

    asyncio.run(law())


def test_requests_of_one_episode_are_in_rounds_of_their_own() -> None:
    async def law() -> None:
        engine = EchoEngine()
        rounds = make_rounds(engine, "a", "b")
        asked = [ask(rounds, "a", 1), ask(rounds, "a", 2), ask(rounds, "b", 3)]
        await settle()
        assert len(engine.rounds) == 1
        asked.append(ask(rounds, "b", 4))
        turns = await asyncio.gather(*asked)
        assert [turn.token_ids for turn in turns] == [[1], [2], [3], [4]]
        assert [sorted(each.values()) for each in engine.rounds] == [[[1], [3]], [[2], [4]]]

    asyncio.run(law())
