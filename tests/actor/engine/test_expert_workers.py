"""Laws of experts in an engine of two workers, each with its half of every expert."""

from pathlib import Path

import pytest

from tests.actor.engine.engine_rig import Rig
from tests.actor.engine.test_experts import follow_versions, save_policy_of

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
        rig.run(check_versions(rig))
    finally:
        rig.close()


async def check_versions(rig: Rig) -> None:
    await follow_versions(rig, num_prompts=4, num_tokens=40)
