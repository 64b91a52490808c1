"""Laws of an engine that gives its memory back during the learner's step.

vLLM's CPU worker accepts the calls and keeps its memory, so these tests hold their order.
"""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from tests.actor.engine.engine_rig import WAIT_S, Rig
from tests.actor.engine.test_engine import make_prompts, mean_delta, sample

pytestmark = pytest.mark.slow

LIMIT = 1e-4  # mean |delta logprob|, nats


@pytest.fixture
def rig(exact_rig: Rig) -> Iterator[Rig]:
    cfg = exact_rig.engine._cfg
    yield exact_rig
    exact_rig.engine._cfg = cfg


@pytest.mark.parametrize("level", [1, 2])
def test_sleeping_engine_samples_again_with_the_next_version(rig: Rig, level: int) -> None:
    rig.engine._cfg = replace(rig.engine._cfg, sleep=level)
    first = 10 * level

    async def law() -> None:
        prompts = make_prompts(4, num_tokens=40)
        with rig.learner() as (publisher, _):
            async with rig.link() as (link, _task):
                await rig.publish_first(publisher, link, rig.weights(first))
                assert await asyncio.to_thread(publisher.put_to_sleep, timeout_s=WAIT_S)
                assert rig.engine.is_asleep
                assert await rig.engine._llm.is_sleeping()
                (staged,) = await rig.engine._llm.collective_rpc("staged")
                assert staged["error"] == "no version was offered"  # Its buffer is free.
                waiting = asyncio.create_task(sample(rig, prompts))
                rig.randomize(seed=level)
                await asyncio.to_thread(publisher.publish, rig.weights(first + 1))
                turns = await waiting
                assert not rig.engine.is_asleep
                assert not await rig.engine._llm.is_sleeping()
                assert mean_delta(rig, prompts, turns) <= LIMIT
                # The next step puts the same engine to sleep again.
                assert await asyncio.to_thread(publisher.put_to_sleep, timeout_s=WAIT_S)
                await asyncio.to_thread(publisher.publish, rig.weights(first + 2))
                assert not rig.engine.is_asleep
        assert {version for turn in turns for version in turn.versions} == {first + 1}

    rig.run(law())


def test_round_that_waits_for_a_sleeper_does_not_block_its_version(rig: Rig) -> None:
    rig.engine._cfg = replace(rig.engine._cfg, sleep=1)

    async def law() -> None:
        with rig.learner() as (publisher, _):
            async with rig.link() as (link, _task):
                await rig.publish_first(publisher, link, rig.weights(30))
                assert await asyncio.to_thread(publisher.put_to_sleep, timeout_s=WAIT_S)
                async with link._exclusive:  # A round holds the lock while it waits.
                    prompts = {"round": [5, 6, 7]}
                    seeds = {"round": 1}
                    waiting = asyncio.create_task(
                        rig.engine.generate_together(
                            prompts, max_tokens=5, salt=lambda: "round", seeds=seeds
                        )
                    )
                    await asyncio.to_thread(publisher.publish, rig.weights(31))
                    turns = await waiting
        assert set(turns["round"].versions) == {31}

    rig.run(law())


def test_restarted_learner_wakes_a_sleeping_engine_with_the_same_version(rig: Rig) -> None:
    rig.engine._cfg = replace(rig.engine._cfg, sleep=1)

    async def law() -> None:
        prompts = make_prompts(2, num_tokens=20)
        with ExitStack() as first:
            publisher, _ = first.enter_context(rig.learner())
            async with rig.link() as (link, _task):
                await rig.publish_first(publisher, link, rig.weights(40))
                assert await asyncio.to_thread(publisher.put_to_sleep, timeout_s=WAIT_S)
                first.close()  # The learner dies during its step.
                assert rig.engine.is_asleep
                link.version_loaded.clear()
                waiting = asyncio.create_task(sample(rig, prompts))
                with rig.learner() as (publisher, _):  # It resumed from version 40.
                    await rig.publish_first(publisher, link, rig.weights(40))
                    turns = await waiting
                    assert not await rig.engine._llm.is_sleeping()
                    assert mean_delta(rig, prompts, turns) <= LIMIT
                    assert await asyncio.to_thread(publisher.put_to_sleep, timeout_s=WAIT_S)
                    await asyncio.to_thread(publisher.publish, rig.weights(41))
        assert {version for turn in turns for version in turn.versions} == {40}

    rig.run(law())
