"""Laws of turns that arrive as one message, and of the actor's work for each of their tokens."""

import asyncio
import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest

from actor.rollout.context import Tape, Turn
from tests.actor.engine.engine_rig import Rig
from tests.actor.engine.test_engine import make_prompts

pytestmark = pytest.mark.slow

SHORT = 64
LONG = 256


@pytest.fixture
def rig(exact_rig: Rig) -> Rig:
    return exact_rig


async def calls_during(rig: Rig, name: str, *, num_tokens: int) -> int:
    """Return the calls, of Python and C, of this thread while one turn is sampled."""
    calls = 0

    def count(_: FrameType, event: str, __: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        turn = await rig.generate(name, [5, 6, 7], max_tokens=num_tokens)
        tape = Tape()
        tape.add(turn, 0)
        tape.end(0)
    finally:
        sys.setprofile(None)
    assert len(turn.token_ids) == len(tape.token_ids) == len(turn.logprobs) == num_tokens
    return calls


def test_calls_do_not_grow_with_the_tokens_of_a_turn(rig: Rig) -> None:
    """With a message for each token, 192 more tokens are 20,000 more calls."""

    async def law() -> None:
        with rig.learner() as (publisher, _):
            async with rig.link() as (link, _task):  # Forced tokens end no turn early.
                await rig.publish_first(publisher, link, rig.forced_weights(1))
        short = await calls_during(rig, "short", num_tokens=SHORT)
        long = await calls_during(rig, "long", num_tokens=LONG)
        assert long - short < 10 * (LONG - SHORT)  # Timers of the loop also make calls.

    rig.run(law())


def test_cancelled_turns_do_not_delay_a_pause(rig: Rig) -> None:
    async def law() -> None:
        running = [
            rig.generate(f"cancelled-{n}", prompt, max_tokens=400)
            for n, prompt in enumerate(make_prompts(4, num_tokens=20))
        ]
        await rig.generate("clock", [5, 6], max_tokens=10)
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        with rig.learner() as (publisher, _):
            async with rig.link() as (link, _task):
                await rig.publish_first(publisher, link, rig.weights(1))
        turn = await rig.generate("after", [5, 6], max_tokens=30)
        assert set(turn.versions) == {1}

    rig.run(law())


def test_turn_across_two_pauses_keeps_every_token_and_logprob(rig: Rig) -> None:
    async def turn_across_pauses(name: str) -> Turn | None:
        """Return a turn, or None if the policy ended it before the second pause."""
        running = rig.generate(name, [5, 6, 7], max_tokens=200)
        is_across = True
        for number in range(2):
            await rig.generate(f"{name}-clock-{number}", [5, 6], max_tokens=10)
            await rig.engine._llm.pause_generation(mode="keep", clear_cache=False)
            is_across = not running.done()
            await rig.engine._llm.resume_generation()
        turn = await running
        return turn if is_across else None

    async def law() -> None:
        rig.randomize(seed=1)
        with rig.learner() as (publisher, _):
            async with rig.link() as (link, _task):
                await rig.publish_first(publisher, link, rig.weights(1))
        turn = None
        for attempt in range(50):
            turn = turn or await turn_across_pauses(f"long-{attempt}")
        assert turn is not None
        (scores,) = await rig.engine.score([[5, 6, 7, *turn.token_ids]], request_id="score")
        assert len(turn.token_ids) == len(turn.versions) > 10
        assert np.allclose(scores[2:], turn.logprobs, atol=1e-4)

    rig.run(law())


@pytest.mark.parametrize("has_running", [True, False])
def test_waiting_requests_reuse_no_prefix_of_older_weights(rig: Rig, has_running: bool) -> None:
    async def law() -> None:
        (prompt,) = make_prompts(1, num_tokens=150)
        first = rig.engine.version + 1
        with rig.learner() as (publisher, _):
            async with rig.link() as (link, _task):
                await rig.publish_first(publisher, link, rig.weights(first))
                await rig.generate(f"{first}-before", prompt, max_tokens=2)
                again = await rig.generate(f"{first}-again", prompt, max_tokens=2)
                assert again.num_cached > 0
                for attempt in range(50):  # The policy may end a turn before the pause.
                    running: list[asyncio.Task[Turn]] = []
                    if has_running:
                        name = f"{first}-running-{attempt}"
                        running += [rig.generate(name, [5, 6, 7], max_tokens=400)]
                        await rig.generate(f"{name}-clock", [5, 6], max_tokens=10)
                    await rig.engine._llm.pause_generation(mode="keep", clear_cache=False)
                    if not any(task.done() for task in running):
                        break
                    await rig.engine._llm.resume_generation()
                assert not any(task.done() for task in running)
                queued = rig.generate(f"{first}-queued", prompt, max_tokens=2)
                await asyncio.sleep(0)  # The request leaves for the paused engine.
                assert rig.engine.num_running == 1 + len(running)
                rig.engine._is_whole.clear()
                late = rig.generate(f"{first}-late", prompt, max_tokens=2)
                await asyncio.sleep(0)  # This one waits in the actor.
                await asyncio.to_thread(publisher.publish, rig.weights(first + 1))
                turn, later = await queued, await late
                await asyncio.wait(running) if running else None
        assert set(turn.versions + later.versions) == {first + 1}
        assert turn.num_cached == 0
        assert later.num_cached == 0

    rig.run(law())


def test_round_that_waits_for_whole_weights_reuses_no_older_prefix(rig: Rig) -> None:
    async def law() -> None:
        (prompt,) = make_prompts(1, num_tokens=150)
        engine = rig.engine
        first = engine.version + 1
        with rig.learner() as (publisher, _):
            async with rig.link() as (link, _task):
                await rig.publish_first(publisher, link, rig.weights(first))
                await rig.generate(f"{first}-before", prompt, max_tokens=2)
                engine._is_whole.clear()  # A failed update leaves the engine so.
                round_of_one = asyncio.create_task(
                    engine.generate_together(
                        {f"{first}-round": prompt},
                        max_tokens=2,
                        salt=lambda: f"v{engine.version}",
                        seeds={f"{first}-round": 1},
                    )
                )
                await asyncio.sleep(0)
                await asyncio.to_thread(publisher.publish, rig.weights(first + 1))
                (turn,) = (await round_of_one).values()
        assert set(turn.versions) == {first + 1}
        assert turn.num_cached == 0

    rig.run(law())


def test_merged_outputs_equal_the_sequence_of_their_parts() -> None:
    from vllm.v1.engine import EngineCoreOutput, FinishReason
    from vllm.v1.outputs import LogprobsLists

    from actor.engine.whole_turns import merged

    def part(*tokens: int, **other: Any) -> EngineCoreOutput:
        column = np.array(tokens, dtype=np.int32)[:, None]
        lists = LogprobsLists(column, -column / 10, column[:, 0] + 1)
        return EngineCoreOutput("a", list(tokens), new_logprobs=lists, **other)

    experts = [np.full((n, 2, 1), n) for n in (1, 2)]
    end = FinishReason.LENGTH
    whole = merged(
        [
            part(7, routed_experts=experts[0]),
            part(8, 9, routed_experts=experts[1]),
            part(4, finish_reason=end, stop_reason=4),
        ]
    )
    assert whole.new_token_ids == [7, 8, 9, 4]
    assert (whole.finish_reason, whole.stop_reason) == (end, 4)
    assert whole.new_logprobs is not None
    assert whole.new_logprobs.logprob_token_ids.tolist() == [[7], [8], [9], [4]]
    assert whole.new_logprobs.logprobs.tolist() == [[-0.7], [-0.8], [-0.9], [-0.4]]
    assert whole.new_logprobs.sampled_token_ranks.tolist() == [8, 9, 10, 5]
    assert whole.routed_experts is not None
    assert whole.routed_experts[:, 0, 0].tolist() == [1, 2, 2]
