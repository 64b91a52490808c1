"""Laws of past versions as opponents."""

import asyncio
from dataclasses import replace
from pathlib import Path

from actor.api.past import newer_version, past_versions, with_past_version
from actor.policy import PolicyConfig, PolicySection
from common.config.load import load_config
from common.join.shards import write_manifest
from common.store.run_dir import RunDir

CFG = load_config("smoke", [], schema=PolicyConfig)


def save(run_dir: RunDir, step: int, *, is_complete: bool = True) -> Path:
    folder = run_dir.checkpoints / f"step-{step:06d}"
    folder.mkdir(parents=True)
    if is_complete:
        (folder / "COMPLETE").write_text("{}", encoding="utf-8")
    return folder


def test_only_complete_checkpoints_are_past_versions(tmp_path: Path) -> None:
    run_dir = RunDir(root=tmp_path)
    assert past_versions(run_dir) == []
    second, first = save(run_dir, 20), save(run_dir, 10)
    save(run_dir, 30, is_complete=False)
    assert past_versions(run_dir) == [first, second]
    write_manifest(second, [])  # Its files are on several nodes.
    assert past_versions(run_dir) == [first]


def test_engine_serves_the_start_or_a_checkpoint(tmp_path: Path) -> None:
    run_dir = RunDir(root=tmp_path)
    of_role = [replace(CFG, policy=PolicySection(role=f"opponent-past-{i}")) for i in range(12)]
    assert {with_past_version(each, run_dir).model.path for each in of_role} == {CFG.model.path}
    folders = {str(save(run_dir, step)) for step in (10, 20)}
    served = [with_past_version(each, run_dir).model.path for each in of_role]
    assert {*served} == {CFG.model.path, *folders}
    assert served == [with_past_version(each, run_dir).model.path for each in of_role]


def test_version_changes_after_its_time_and_a_newer_checkpoint(tmp_path: Path) -> None:
    run_dir = RunDir(root=tmp_path)
    save(run_dir, 10)
    seconds = [0.0]

    async def run() -> None:
        waiting = asyncio.create_task(
            newer_version(run_dir, after_s=60.0, now=lambda: seconds[0], poll_s=0.0)
        )
        for _ in range(20):
            await asyncio.sleep(0)
        seconds[0] = 61.0  # No newer checkpoint.
        for _ in range(20):
            await asyncio.sleep(0)
        assert not waiting.done()
        save(run_dir, 20)
        await asyncio.wait_for(waiting, 60)

    asyncio.run(run())
