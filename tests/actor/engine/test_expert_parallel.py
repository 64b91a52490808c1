"""Laws of an engine whose workers hold different experts, on vLLM's CPU build."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.actor.engine.engine_rig import Rig
from tests.actor.engine.test_engine import make_prompts, mean_delta, sample
from tests.actor.engine.test_experts import LIMIT, save_policy_of

pytestmark = [pytest.mark.slow, pytest.mark.long]

NUM_WORKERS = 2


@pytest.mark.parametrize("is_parallel", [True, False])
def test_each_worker_receives_its_experts(
    is_parallel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    args: dict[str, Any] = {"enable_expert_parallel": True} if is_parallel else {}
    rig = Rig(
        tmp_path,
        dtype="float32",
        is_tied=False,
        num_workers=NUM_WORKERS,
        save=lambda path: save_policy_of(path, "qwen3_moe"),
        engine_args=args,
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
