"""Laws of an engine of two workers, each with its half of the layers, on vLLM's CPU build."""

import asyncio
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from common.errors import WeightSyncError
from learner.weights.source import policy_weights
from tests.actor.engine.engine_rig import WAIT_S, Rig
from tests.actor.engine.test_changes import change_some, live
from tests.actor.engine.test_engine import (
    LIMITS,
    forced,
    make_prompts,
    mean_delta,
    offer_of,
    sample,
    send_damaged,
)
from tests.common.weights.meeting import Meeting

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
        rig.run(take_changes(rig))
        rig.run(take_forced(rig))
        rig.run(refuse_a_damaged_one(rig, is_shared=False))
        rig.run(refuse_a_damaged_one(rig, is_shared=True))
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
                weights = rig.weights(version, prompts)
                await rig.publish_first(publisher, link, weights)
                turns = await asyncio.gather(
                    *(
                        rig.generate(f"{version}-{i}", prompt, max_tokens=8)
                        for i, prompt in enumerate(prompts)
                    )
                )
                assert mean_delta(rig, prompts, turns) < LIMITS[rig.dtype]
                assert {each for turn in turns for each in turn.versions} == {version}
    metrics = publisher.drain_metrics()
    assert publisher.num_canary_alarms == 0
    assert metrics["publish/pause_s"] > 0
    assert metrics["publish/bytes"] == 2 * weights.source.total_bytes, "a copy for each version"


async def take_changes(rig: Rig) -> None:
    prompts = make_prompts(4, num_tokens=40)
    whole = policy_weights(rig.model, rig.dtype).total_bytes
    with rig.learner(keeps_versions=True) as (publisher, _):
        async with rig.link() as (link, _task):
            await rig.publish_first(publisher, link, live(rig, 11, prompts))
            for version in (12, 13):
                change_some(rig, seed=version)
                publisher.drain_metrics()
                await asyncio.to_thread(publisher.publish, live(rig, version, prompts))
                assert publisher.drain_metrics()["publish/bytes"] < 0.3 * whole
                after = await sample(rig, prompts)
                assert mean_delta(rig, prompts, after) < LIMITS[rig.dtype]
    assert publisher.num_canary_alarms == 0


async def take_forced(rig: Rig) -> None:
    with rig.learner() as (publisher, _):
        async with rig.link() as (link, _task):
            await rig.publish_first(publisher, link, rig.forced_weights(3))


async def refuse_a_damaged_one(rig: Rig, *, is_shared: bool) -> None:
    store = Meeting()
    weights = rig.forced_weights(4)
    offer = replace(offer_of(weights, store), world_size=1 + NUM_WORKERS)
    if is_shared:
        offer = replace(offer, world_size=2, copy_key="copy")
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
