"""Laws of versions as changes at a real engine: it computes with exactly the new weights."""

import asyncio
from collections.abc import Iterator

import pytest
import torch

from common.weights.messages import CanaryScores, WeightsLoaded
from learner.weights.source import PublishedWeights, policy_weights
from tests.actor.engine.engine_rig import Rig
from tests.actor.engine.test_engine import LIMITS, eventually, make_prompts, mean_delta, sample

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module", params=["float32", "bfloat16 tied"])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """One engine at a time."""
    dtype, _, tied = request.param.partition(" ")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        rig = Rig(tmp_path_factory.mktemp("rig"), dtype=dtype, is_tied=bool(tied))
        yield rig
        rig.close()


def live(rig: Rig, version: int, canary: list[list[int]]) -> PublishedWeights:
    """Return the trainer's live weights with the scores of canaries."""
    source = policy_weights(rig.model, rig.dtype)
    scores = rig.trainer.score(canary)
    return PublishedWeights(
        version=version, source=source, canary_token_ids=canary, canary_logprobs=scores
    )


@torch.no_grad()
def change_some(rig: Rig, seed: int) -> None:
    """Change a twentieth of the weights by a lot."""
    before = [each.clone() for each in rig.model.parameters()]
    rig.randomize(seed)
    generator = torch.Generator().manual_seed(seed)
    for each, old in zip(rig.model.parameters(), before, strict=True):
        is_kept = torch.rand(each.shape, generator=generator) > 0.05
        each.copy_(torch.where(is_kept, old, each))


def test_engine_computes_with_each_version_of_changes(rig: Rig) -> None:
    async def law() -> None:
        prompts = make_prompts(4, num_tokens=40)
        with rig.learner(keeps_versions=True) as (publisher, listener):
            async with rig.link() as (link, _task):
                rig.randomize(seed=1)
                await rig.publish_first(publisher, link, live(rig, 1, prompts))
                for version in (2, 3):
                    before = await sample(rig, prompts)
                    change_some(rig, seed=version)
                    publisher.drain_metrics()
                    await asyncio.to_thread(publisher.publish, live(rig, version, prompts))
                    metrics = publisher.drain_metrics()
                    whole = policy_weights(rig.model, rig.dtype).total_bytes
                    assert metrics["publish/bytes"] < 0.3 * whole
                    assert mean_delta(rig, prompts, before) > 10 * LIMITS[rig.dtype]
                    after = await sample(rig, prompts)
                    assert mean_delta(rig, prompts, after) <= LIMITS[rig.dtype]
                scored = [m for m in listener.heard if isinstance(m, CanaryScores)]
                await eventually(lambda: len(scored) >= 2)
                assert publisher.num_canary_alarms == 0
        loaded = [m for m in listener.heard if isinstance(m, WeightsLoaded)]
        assert [(m.version, m.is_ok) for m in loaded] == [(1, True), (2, True), (3, True)]

    rig.run(law())


def test_restarted_learner_continues_with_whole_version(rig: Rig) -> None:
    """The second learner repeats a version's number with other weights, and sends its copy."""

    async def law() -> None:
        prompts = make_prompts(4, num_tokens=40)
        with rig.learner(keeps_versions=True) as (publisher, _):
            async with rig.link() as (link, _task):
                await rig.publish_first(publisher, link, live(rig, 11, []))
                publisher.stop()
                change_some(rig, seed=7)
                with rig.learner(keeps_versions=True) as (again, listener):
                    await asyncio.to_thread(again.publish, live(rig, 11, prompts))
                    change_some(rig, seed=8)
                    await eventually(lambda: WeightsLoaded in map(type, listener.heard))
                    await asyncio.to_thread(again.publish, live(rig, 12, prompts))
                    await eventually(lambda: rig.engine.version == 12)
                    assert mean_delta(rig, prompts, await sample(rig, prompts)) <= LIMITS[rig.dtype]

    rig.run(law())
