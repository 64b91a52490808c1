"""Laws of experts in an engine of two workers, each with its half of every expert."""

import asyncio
from pathlib import Path

import pytest

from tests.actor.engine.engine_rig import Rig
from tests.actor.engine.test_engine import make_prompts, mean_delta, sample
from tests.actor.engine.test_experts import LIMIT, save_policy_of

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1200)]


def test_each_worker_receives_its_half_of_every_expert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    rig = Rig(
        tmp_path,
        dtype="float32",
        is_tied=False,
        num_workers=2,
        save=lambda path: save_policy_of(path, "qwen3_moe"),
    )
    try:
        rig.run(follow_versions(rig))
    finally:
        rig.close()


async def follow_versions(rig: Rig) -> None:
    prompts = make_prompts(4, num_tokens=40)
    with rig.learner() as (publisher, _):
        async with rig.link() as (link, _task):
            rig.randomize(seed=1)
            await rig.publish_first(publisher, link, rig.weights(1))
            before = await sample(rig, prompts)
            assert mean_delta(rig, prompts, before) <= LIMIT
            rig.randomize(seed=2)
            assert mean_delta(rig, prompts, before) > 40 * LIMIT
            await asyncio.to_thread(publisher.publish, rig.weights(2))
            after = await sample(rig, prompts)
            assert mean_delta(rig, prompts, after) <= LIMIT
