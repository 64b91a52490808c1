"""Laws of adapters of a mixture of experts in a real vLLM engine on a CPU."""

from collections.abc import Iterator

import pytest

from common.config.learner import LoraSection
from tests.actor.engine.engine_rig import Rig
from tests.actor.engine.test_experts import follow_versions, save_policy_of

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
        await follow_versions(rig, num_prompts=6, num_tokens=60)

    rig.run(law())
