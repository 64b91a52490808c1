"""Laws of an engine of two workers, each with its half of the layers, on vLLM's CPU build."""

import asyncio
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from common.errors import WeightSyncError
from tests.actor.engine.engine_rig import WAIT_S, Rig
from tests.actor.engine.test_engine import (
    LIMITS,
    forced,
    make_prompts,
    mean_delta,
    offer_of,
    send_damaged,
)
from tests.common.wire.meeting import Meeting

pytestmark = [pytest.mark.slow, pytest.mark.long]

NUM_WORKERS = 2


def test_every_worker_receives_and_checks_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    ours = psutil.Process()
    before = set(ours.children(recursive=True))
    rig = Rig(tmp_path, dtype="float32", is_tied=False, num_workers=NUM_WORKERS)
    started = [
        each
        for each in set(ours.children(recursive=True)) - before
        if "resource_tracker" not in " ".join(each.cmdline())  # of the tests' own process
    ]
    try:
        rig.run(take_versions(rig))
        rig.run(refuse_a_damaged_one(rig))
    finally:
        rig.close()
    _, left = psutil.wait_procs(started, timeout=WAIT_S)
    assert len(started) > NUM_WORKERS
    assert left == []


async def take_versions(rig: Rig) -> None:
    assert await rig.engine.device_ids() == [""] * NUM_WORKERS
    with rig.learner() as (publisher, _):
        async with rig.link() as (link, _task):
            prompts = make_prompts(4, num_tokens=40)
            for version in (1, 2):
                rig.randomize(seed=version)
                link.version_loaded.clear()
                await rig.publish_first(publisher, link, rig.weights(version, prompts))
                turns = await asyncio.gather(
                    *(
                        rig.generate(f"{version}-{i}", prompt, max_tokens=8)
                        for i, prompt in enumerate(prompts)
                    )
                )
                assert mean_delta(rig, prompts, turns) < LIMITS[rig.dtype]
                assert {each for turn in turns for each in turn.versions} == {version}
            link.version_loaded.clear()
            await rig.publish_first(publisher, link, rig.forced_weights(3))
    metrics = publisher.drain_metrics()
    assert publisher.num_canary_alarms == 0
    assert metrics["publish/pause_s"] > 0


async def refuse_a_damaged_one(rig: Rig) -> None:
    store = Meeting()
    weights = rig.forced_weights(4)
    offer = replace(offer_of(weights, store), world_size=1 + NUM_WORKERS)
    sending: list[asyncio.Future[None]] = []
    with pytest.raises(WeightSyncError) as refused:
        await rig.engine.stage(
            offer,
            announce=lambda: sending.append(
                asyncio.ensure_future(asyncio.to_thread(send_damaged, store, weights, offer))
            ),
        )
    await asyncio.gather(*sending)
    # Each worker reports it.
    assert str(refused.value).count("is damaged: checksum") == NUM_WORKERS
    turn = await rig.generate("after", [5, 6], max_tokens=8)
    assert turn.versions == forced(turn) == [3] * 8
