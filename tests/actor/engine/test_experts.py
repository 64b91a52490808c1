"""Laws of mixtures of experts in a real vLLM engine, fed by the learner's real publisher."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from actor.rollout.episode import Turn
from learner.policy.saving import save_tokenizer
from tests.actor.engine.engine_rig import Rig
from tests.actor.engine.test_engine import make_prompts, mean_delta, sample
from tests.learner.experts import KINDS, VOCAB, save_experts
from tools.offline.scratch import make_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.long]

LIMIT = 1e-4  # mean |delta logprob|, nats


async def follow_versions(
    rig: Rig, *, num_prompts: int, num_tokens: int, seeds: Sequence[int] = (2,)
) -> list[Turn]:
    """Assert equal logprobs of engine and trainer at each version; return the last turns."""
    prompts = make_prompts(num_prompts, num_tokens=num_tokens)
    with rig.learner() as (publisher, _):
        async with rig.link() as (link, _task):
            rig.randomize(seed=1)
            await rig.publish_first(publisher, link, rig.weights(1))
            turns = await sample(rig, prompts)
            assert mean_delta(rig, prompts, turns) <= LIMIT
            for seed in seeds:
                rig.randomize(seed=seed)
                assert mean_delta(rig, prompts, turns) > 40 * LIMIT
                await asyncio.to_thread(publisher.publish, rig.weights(seed))
                turns = await sample(rig, prompts)
                assert mean_delta(rig, prompts, turns) <= LIMIT
    return turns


def save_policy_of(folder: Path, kind: str) -> None:
    save_experts(folder, kind)
    words = ["go to the red ball", "pick up the grey key"]
    save_tokenizer(folder, make_tokenizer(words, vocab_size=VOCAB))


@pytest.fixture(scope="module", params=KINDS)
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        folder = tmp_path_factory.mktemp("rig")
        rig = Rig(
            folder,
            dtype="float32",
            is_tied=False,
            save=lambda path: save_policy_of(path, request.param),
        )
        yield rig
        rig.close()


def test_engine_of_experts_follows_each_version(rig: Rig) -> None:
    async def law() -> None:
        await follow_versions(rig, num_prompts=6, num_tokens=60, seeds=(2, 3))

    rig.run(law())
