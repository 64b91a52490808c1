"""Laws of adapters in a real vLLM engine, fed by the learner's real publisher."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from actor.rollout.episode import Turn
from common.config.learner import LoraSection
from learner.weights.source import PublishedWeights
from tests.actor.engine.engine_rig import FIRST_FORCED, Rig, forked_engines
from tests.actor.engine.test_engine import make_prompts
from tests.actor.engine.test_experts import follow_versions

pytestmark = pytest.mark.slow

RANK = 3  # none that vLLM has room for exactly
HIDDEN = 64
SPOILT = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"
TABLES = 2 * 320 * HIDDEN  # numbers of embedding and head


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with forked_engines():
        folder = tmp_path_factory.mktemp("rig")
        lora = LoraSection(rank=RANK, alpha=2.0 * RANK)
        rig = Rig(folder, dtype="float32", is_tied=False, lora=lora, prepare=prepare)
        yield rig
        rig.close()


@torch.no_grad()
def prepare(model: Any) -> None:
    """Make a base whose adapters can force tokens: the head reads the first hidden numbers."""
    model.model.embed_tokens.weight.normal_(1.0, 0.2)
    for layer in model.model.layers:
        layer.mlp.gate_proj.weight.fill_(1.0 / HIDDEN)
        layer.mlp.up_proj.weight.fill_(1.0 / HIDDEN)
    head = model.lm_head.weight
    for number in range(8):
        head[FIRST_FORCED + number].zero_()
        head[FIRST_FORCED + number, number] = 10.0


@torch.no_grad()
def force(rig: Rig, version: int) -> PublishedWeights:
    """Adapters that sample token FIRST_FORCED + version: they write its hidden number, large."""
    for name, each in rig.model.named_parameters():
        if ".lora_" in name:
            each.zero_()
            if "down_proj.lora_A" in name:
                each.fill_(1.0)
            if "down_proj.lora_B" in name:
                each[version].fill_(100.0)
    return rig.weights(version)


def test_engine_logprobs_match_trainer_after_each_adapter(rig: Rig) -> None:
    async def law() -> None:
        turns = await follow_versions(rig, num_prompts=8, num_tokens=100)
        assert {version for turn in turns for version in turn.versions} == {2}

    rig.run(law())


def test_token_versions_match_the_sampling_adapter(rig: Rig) -> None:
    async def law() -> None:
        with rig.learner() as (publisher, _):
            async with rig.link() as (link, _task):
                await rig.publish_first(publisher, link, force(rig, 1))
                running = [
                    rig.generate(f"request-{n}", prompt, max_tokens=200 + 40 * n)
                    for n, prompt in enumerate(make_prompts(8, num_tokens=20))
                ]
                for version in (2, 3):
                    await rig.generate(f"clock-{version}", [5, 6], max_tokens=10)
                    await asyncio.to_thread(publisher.publish, force(rig, version))
                completions: list[Turn] = await asyncio.gather(*running)
        for completion in completions:
            assert completion.versions == [id - FIRST_FORCED for id in completion.token_ids]
        assert (1, 2, 3) in {tuple(sorted(set(c.versions))) for c in completions}

    rig.run(law())


@pytest.mark.parametrize("fault", ["omitted", "damaged"])
def test_canary_alarms_on_missing_or_damaged_adapter(rig: Rig, fault: str) -> None:
    canary = make_prompts(4, num_tokens=40)

    async def law() -> None:
        """While others sample: scores of a prompt have more rows than there are requests."""
        with rig.learner() as (publisher, listener):
            async with rig.link() as (link, _task):
                rig.randomize(seed=1)
                old = rig.weights(1, canary)
                await rig.publish_first(publisher, link, old)
                await heard(listener, 1)
                assert publisher.num_canary_alarms == 0
                others = [
                    rig.generate(f"other-{fault}-{n}", prompt, max_tokens=200)
                    for n, prompt in enumerate(make_prompts(3, num_tokens=20))
                ]
                rig.randomize(seed=2)
                new = rig.weights(2, canary)
                faulty = {
                    "omitted": replace(old, version=2, canary_logprobs=new.canary_logprobs),
                    "damaged": rig.weights(2, canary, spoil=SPOILT),
                }[fault]
                await asyncio.to_thread(publisher.publish, faulty)
                await heard(listener, 2)
                assert publisher.num_canary_alarms == 1
                await asyncio.to_thread(publisher.publish, replace(new, version=3))
                await heard(listener, 3)
                assert publisher.num_canary_alarms == 0
                await asyncio.gather(*others)

    rig.run(law())


async def heard(listener: Any, version: int) -> None:
    """Wait until the canary of a version has been compared."""
    async with asyncio.timeout(20.0):
        while version not in {
            m.version for m in listener.heard if type(m).__name__ == "CanaryScores"
        }:
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.05)


def test_only_adapter_tensors_are_sent(rig: Rig) -> None:
    weights = rig.weights(1)
    assert {spec.name.rpartition(".lora_")[2] for spec in weights.tensors} == {
        "A.weight",
        "B.weight",
    }
    whole = sum(each.numel() for each in rig.model.parameters() if not each.requires_grad)
    sent = sum(spec.num_bytes for spec in weights.tensors) // 4
    assert sent == sum(each.numel() for each in rig.model.parameters()) - whole
    assert sent < 0.15 * (whole - TABLES)
