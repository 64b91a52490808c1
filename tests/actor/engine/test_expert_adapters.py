"""Laws of adapters of a mixture of experts in a real vLLM engine on a CPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.conformance.networks import save_network
from common.config.learner import LoraSection
from tests.actor.engine.engine_rig import Rig
from tests.actor.engine.test_experts import follow_versions, save_policy_of
from tests.learner.experts import KINDS

pytestmark = [pytest.mark.slow, pytest.mark.long]

CASES = {
    "attention": ("qwen3_moe", ["q_proj", "k_proj", "v_proj", "o_proj"]),
    "experts": ("qwen3_moe", ["q_proj", "o_proj", "experts"]),  # The engine gets merged weights.
    "reordered": ("llama4_text", ["q_proj", "k_proj"]),  # vLLM changes the order of their rows.
}


@pytest.fixture(scope="module", params=sorted(CASES))
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    family, targets = CASES[request.param]
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        rig = Rig(
            tmp_path_factory.mktemp("rig"),
            dtype="float32",
            is_tied=False,
            save=lambda path: save(family, path),
            lora=LoraSection(rank=4, alpha=8.0, targets=targets),
        )
        yield rig
        rig.close()


def save(family: str, folder: Path) -> None:
    if family in KINDS:
        save_policy_of(folder, family)
    else:
        save_network(family, folder, settings={"max_position_embeddings": 512})


def test_engine_of_experts_follows_each_adapter(rig: Rig) -> None:
    async def law() -> None:
        await follow_versions(rig, num_prompts=6, num_tokens=60)

    rig.run(law())
