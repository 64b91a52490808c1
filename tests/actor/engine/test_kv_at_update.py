"""Laws of what becomes of keys and values that older weights computed, on a real engine."""

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from actor.rollout.env_client import ExpertHint, HubStepResult
from actor.rollout.episode import Turn
from common.config.actor import ActorSection, AtUpdate
from common.wire.messages import Trajectory
from tests.actor.engine.engine_rig import Rig
from tests.actor.engine.test_engine import make_prompts
from tests.actor.rollout.playing import LEASE

pytestmark = [pytest.mark.slow, pytest.mark.long]

BLOCK_TOKENS = 32  # of the engine's cache on a CPU
EXACT = 1e-5  # nats, mean over tokens; with a cache of both versions they are 1.5 apart
keep_and_drop = pytest.mark.parametrize("rig", [AtUpdate.KEEP, AtUpdate.DROP], indirect=True)
keep = pytest.mark.parametrize("rig", [AtUpdate.KEEP], indirect=True)


@pytest.fixture(scope="module")
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """One engine at a time."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        folder = tmp_path_factory.mktemp("rig")
        rig = Rig(folder, dtype="float32", is_tied=False, at_update=request.param)
        yield rig
        rig.close()


def deltas(rig: Rig, prompts: list[list[int]], turns: list[Turn], *, version: int) -> list[float]:
    """|logprob of the engine - of the trainer's present weights| of all tokens of a version."""
    sequences = [p + t.token_ids for p, t in zip(prompts, turns, strict=True)]
    return [
        abs(ours - theirs)
        for scores, turn in zip(rig.trainer.score(sequences), turns, strict=True)
        for ours, theirs, label in zip(
            scores[-len(turn.logprobs) :], turn.logprobs, turn.versions, strict=True
        )
        if label == version
    ]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@keep_and_drop
def test_dropped_cache_leaves_only_new_weights(rig: Rig) -> None:
    async def law() -> None:
        prompts = make_prompts(12, num_tokens=150)
        with rig.learner() as (publisher, _):
            async with rig.link() as (link, _task):
                rig.randomize(seed=1)
                await rig.publish_first(publisher, link, rig.weights(1))
                await rig.generate("clock", [5, 6], max_tokens=10)
                rig.randomize(seed=2)
                newer = rig.weights(2)
                published = asyncio.ensure_future(asyncio.to_thread(publisher.publish, newer))

                async def ask_until_across(n: int) -> Turn:
                    """However long the weights take, there is a request of each when they come."""
                    for attempt in itertools.count():
                        is_last = published.done()
                        name = f"{n}/{attempt}"
                        turn = await rig.generate(name, prompts[n], max_tokens=150)
                        if is_last or set(turn.versions) == {1, 2}:
                            return turn
                    raise AssertionError("unreachable")

                turns = await asyncio.gather(*map(ask_until_across, range(len(prompts))))
                await published
        assert all(turn.versions == sorted(turn.versions) for turn in turns)
        across = [n for n, turn in enumerate(turns) if set(turn.versions) == {1, 2}]
        assert len(across) >= 3, "the others sampled an end of text before"
        prompts, turns = [prompts[n] for n in across], [turns[n] for n in across]
        after = deltas(rig, prompts, turns, version=2)
        is_exact = mean(after) <= EXACT
        assert is_exact == (rig.at_update is AtUpdate.DROP)
        rig.randomize(seed=1)
        assert mean(deltas(rig, prompts, turns, version=1)) <= EXACT

    rig.run(law())


class _Corridor:
    """A session of three turns, with new weights before the second one."""

    first_observation = "go to the red ball " * 30
    first_state = ""
    start_score = 0.0

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._num_steps = 0

    async def step(self, action: str) -> HubStepResult:
        self._num_steps += 1
        self._engine.version += self._num_steps == 1
        return HubStepResult(
            observation="on", reward=0.0, done=False, is_valid=True, is_success=False
        )

    async def hint(self) -> ExpertHint:
        raise AssertionError("the model plays")

    async def close(self) -> None:
        pass


@keep
@pytest.mark.parametrize("prefixes", list(AtUpdate))
def test_turns_reuse_old_prefixes_only_if_kept(rig: Rig, prefixes: AtUpdate) -> None:
    from transformers import AutoTokenizer

    from actor.formats.renderer import Renderer
    from actor.rollout.pool import EpisodePool

    async def law() -> None:
        rig.engine.version = {AtUpdate.KEEP: 10, AtUpdate.DROP: 20}[prefixes]
        first = rig.engine.version
        played: list[Trajectory] = []
        done = asyncio.Event()

        async def put(trajectory: Trajectory) -> None:
            played.append(trajectory)
            done.set()

        async def open_session(*_: Any, **__: Any) -> _Corridor:
            return _Corridor(rig.engine)

        path = str(rig.run_dir.root / "policy")
        cfg = ActorSection(max_model_len=512, max_turn_tokens=8, prefixes_at_update=prefixes)
        environments: Any = SimpleNamespace(
            open=open_session,
            instruction=lambda _: "",
            acknowledgement=lambda _: "",
            is_gone=lambda _: False,
            tools=lambda _: [],
            opponent_texts=lambda _: {},
        )
        delivery: Any = SimpleNamespace(put=put)
        episodes = EpisodePool(
            cfg,
            actor="a",
            engine=rig.engine,
            renderer=Renderer(AutoTokenizer.from_pretrained(path)),
            environments=environments,
            delivery=delivery,
            rounds=None,
        )
        for number in range(2):  # the second one began under the new weights
            done.clear()
            episodes.start([replace(LEASE, episode_id=f"{prefixes}/{number}", deadline_s=60.0)])
            is_played = asyncio.ensure_future(done.wait())
            async with asyncio.timeout(240.0):
                await asyncio.wait({is_played, episodes.failed}, return_when="FIRST_COMPLETED")
            assert is_played.done(), episodes.failed.exception()
            assert rig.engine.version == first + 1 + number
        assert all(set(each.turn_ids[each.loss_mask].tolist()) == {0, 1, 2} for each in played)
        # Kept: the second and third turn find the prompt, and an episode's first one finds nothing
        # that is older than itself. Dropped: the third turn does, and the first one of the second
        # episode, whose weights are those of the first one's last turns.
        num_found = {AtUpdate.KEEP: [2, 2], AtUpdate.DROP: [1, 2]}[prefixes]
        num_prompt = int((played[0].turn_ids == 0).sum() - played[0].loss_mask.sum() // 3)
        found = num_prompt // BLOCK_TOKENS * BLOCK_TOKENS
        assert found > 2 * BLOCK_TOKENS, "later turns add less than that"
        assert [each.num_cached_tokens // found for each in played] == num_found

    rig.run(law())
