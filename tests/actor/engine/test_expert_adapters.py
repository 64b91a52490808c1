"""Laws of adapters of a mixture of experts in a real vLLM engine on a CPU."""

import asyncio
from collections.abc import Iterator

import pytest

from common.config.learner import LoraSection
from tests.actor.engine.engine_rig import Rig
from tests.actor.engine.test_engine import make_prompts, mean_delta, sample
from tests.actor.engine.test_experts import LIMIT, save_policy_of

pytestmark = [pytest.mark.slow, pytest.mark.long]

TARGETS = {
    "attention": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "experts": ["q_proj", "o_proj", "experts"],  # The engine receives merged weights.
}


@pytest.fixture(scope="module", params=sorted(TARGETS))
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        rig = Rig(
            tmp_path_factory.mktemp("rig"),
            dtype="float32",
            is_tied=False,
            save=lambda path: save_policy_of(path, "qwen3_moe"),
            lora=LoraSection(rank=4, alpha=8.0, targets=TARGETS[request.param]),
        )
        yield rig
        rig.close()


def test_engine_of_experts_follows_each_adapter(rig: Rig) -> None:
    async def law() -> None:
        prompts = make_prompts(6, num_tokens=60)
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

    rig.run(law())
