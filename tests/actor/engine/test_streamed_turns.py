"""Laws of turns whose tokens arrive as they are sampled, from a real engine to real clients."""

import asyncio
from itertools import count
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from actor.agents import streams
from actor.agents.server import AgentServer
from actor.formats.renderer import Renderer
from actor.rollout.context import Turn
from actor.rollout.episode import EnvSession, OnTokens
from tests.actor.agents.endpoint import ByHeart, new_episode
from tests.actor.agents.streaming_clients import timings
from tests.actor.agents.test_lineages import LONG
from tests.actor.engine.engine_rig import FIRST_FORCED, Rig
from tests.actor.engine.test_engine import make_prompts

pytestmark = pytest.mark.slow

PROMPT = [5, 6, 7]
MAX_TOKENS = 200  # An answer has at most so many.


@pytest.fixture
def rig(exact_rig: Rig) -> Rig:
    return exact_rig


def streamed(rig: Rig, name: str, on_tokens: OnTokens, prompt: list[int] = PROMPT) -> Any:
    """Start a request whose tokens arrive as they are sampled."""
    return asyncio.create_task(
        rig.engine.generate(
            prompt, request_id=name, max_tokens=MAX_TOKENS, salt=lambda: name, on_tokens=on_tokens
        )
    )


async def has_forced(rig: Rig, version: int) -> None:
    """Let the engine sample one token only, so that no turn ends early."""
    with rig.learner() as (publisher, _):
        async with rig.link() as (link, _task):
            await rig.publish_first(publisher, link, rig.forced_weights(version))


async def until_idle(rig: Rig) -> None:
    """Wait until the engine has no request."""
    async with asyncio.timeout(30):
        while rig.engine.llm.output_processor.has_unfinished_requests():
            await asyncio.sleep(0.01)


def test_parts_of_a_turn_are_the_tokens_of_the_turn(rig: Rig) -> None:
    async def law() -> None:
        rig.randomize(seed=1)
        with rig.learner() as (publisher, _):
            async with rig.link() as (link, _task):
                await rig.publish_first(publisher, link, rig.weights(1))
        longest = 0
        for number, prompt in enumerate(make_prompts(8, num_tokens=20)):
            parts: list[Turn] = []
            turn = await streamed(rig, f"parts-{number}", parts.append, prompt)
            arrived = [token for part in parts for token in part.token_ids]
            assert arrived == turn.token_ids[: len(arrived)]
            assert len(arrived) < len(turn.token_ids)  # A busy machine joins the last parts.
            logprobs = [each for part in parts for each in part.logprobs]
            assert logprobs == turn.logprobs[: len(logprobs)]
            (scores,) = await rig.engine.score(
                [[*prompt, *turn.token_ids]], request_id=f"score-{number}"
            )
            assert np.allclose(scores[len(prompt) - 1 :], turn.logprobs, atol=1e-4)
            longest = max(longest, len(parts))
        assert longest > 10

    rig.run(law())


def test_parts_have_the_version_that_sampled_them(rig: Rig) -> None:
    async def law() -> None:
        with rig.learner() as (publisher, _):
            async with rig.link() as (link, _task):
                await rig.publish_first(publisher, link, rig.forced_weights(1))
                parts: list[Turn] = []
                running = [streamed(rig, f"versions-{number}", parts.append) for number in range(4)]
                await asyncio.to_thread(publisher.publish, rig.forced_weights(2))
                turns = await asyncio.gather(*running)
        sampled = [(token, version) for part in parts for token, version in pairs(part)]
        assert {version for _, version in sampled} == {1, 2}
        for turn in turns:
            sampled += pairs(turn)
        assert all(token - FIRST_FORCED == version for token, version in sampled)

    rig.run(law())


def pairs(turn: Turn) -> list[tuple[int, int]]:
    return list(zip(turn.token_ids, turn.versions, strict=True))


class EnoughTokens(Exception):
    """Raised by a receiver that wants no further token."""


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_left_stream_aborts_the_request(rig: Rig, is_cancelled: bool) -> None:
    async def law() -> None:
        await has_forced(rig, 1)
        arrived = 0
        has_some = asyncio.Event()

        def receive(part: Turn) -> None:
            nonlocal arrived
            arrived += len(part.token_ids)
            if arrived >= 5:
                has_some.set()
                if not is_cancelled:
                    raise EnoughTokens

        task = streamed(rig, f"left-{is_cancelled}", receive)
        await has_some.wait()
        if is_cancelled:
            task.cancel()
        with pytest.raises(asyncio.CancelledError if is_cancelled else EnoughTokens):
            await task
        await until_idle(rig)
        assert 5 <= arrived < MAX_TOKENS

    rig.run(law())


class Served(ByHeart):
    """The policy of a real engine."""

    def __init__(self, rig: Rig, renderer: Renderer) -> None:
        super().__init__([""], renderer=renderer)
        self._rig = rig
        self._numbers = count()

    async def act(
        self, ids: list[int], _: EnvSession, /, on_tokens: OnTokens | None = None
    ) -> Turn:
        return await self._rig.engine.generate(
            ids,
            request_id=f"served-{next(self._numbers)}",
            max_tokens=MAX_TOKENS,
            salt=lambda: "served",
            on_tokens=on_tokens,
        )


def test_clients_read_the_first_token_long_before_the_last(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last request is left after its first event: its tokens are recorded, too."""
    monkeypatch.setattr(streams, "RECONNECT_S", 0.1)

    async def law() -> None:
        path = rig.run_dir.root / "policy"
        renderer = Renderer(AutoTokenizer.from_pretrained(path, local_files_only=True))
        ids = range(FIRST_FORCED + 1, renderer.num_tokens)
        letter = next(each for each in ids if renderer.shown([each]).strip().isalpha())
        await has_forced(rig, letter - FIRST_FORCED)
        policy = Served(rig, renderer)
        server = AgentServer()
        await server.start()
        episode, _ = new_episode(policy, renderer, lease=LONG, room=(500, MAX_TOKENS))
        with server.serving(episode):
            for first_s, whole_s, number in (await timings(server.url, episode.key)).values():
                assert number > MAX_TOKENS / 2
                assert 0 < first_s < whole_s / 3
            await until_idle(rig)
        (num_whole, num_left) = divmod(sum(episode.tape().loss_mask), MAX_TOKENS)
        assert num_whole == 6
        assert 0 < num_left < MAX_TOKENS
        await server.close()
        episode.failed.cancel()

    rig.run(law())
