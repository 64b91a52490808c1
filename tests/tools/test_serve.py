"""Laws of the command `serve`: context, adapters, connections, past versions of a run."""

import asyncio
import contextlib
import json
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from fastapi import FastAPI

from actor.api.chat import bound
from actor.policy import PolicyConfig, PolicySection
from common.config.load import load_config
from common.errors import ConfigError
from common.http import serving as limits
from common.repository import ROOT
from common.store.run_dir import RunDir
from learner.training.shards import write_manifest
from tools.serve import (
    base_of,
    model_id,
    newer_version,
    past_versions,
    serving,
    with_context,
    with_past_version,
)

SMOKE = load_config("smoke", [], schema=PolicyConfig)


@pytest.mark.parametrize(
    ("overrides", "context", "is_fitted"),
    [
        ([], 2048, True),  # The tiny policy's own.
        (["policy.max_model_len=300"], 300, False),
        (["policy.role=teacher", "actor.max_model_len=400"], 400, False),
    ],
)
def test_served_context_is_the_models_own(
    overrides: list[str], context: int, is_fitted: bool
) -> None:
    cfg = load_config("quickstart", overrides, schema=PolicyConfig)
    actor = with_context(cfg, ROOT / "configs" / "policies" / "tiny")
    assert actor.max_model_len == context
    assert ("max_model_len" in actor.engine_args) == is_fitted


def test_model_id_is_one_word() -> None:
    cfg = load_config(
        "quickstart", ["run.name=a", "model.source=org/Model-1B@main"], schema=PolicyConfig
    )
    assert model_id(cfg) == "a-org-Model-1B"


def test_adapters_are_served_with_their_base_weights(tmp_path: Path) -> None:
    assert base_of(tmp_path)[0] == tmp_path
    told = {"r": 4, "lora_alpha": 8, "target_modules": ["v_proj", "q_proj"]}
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**told, "base_model_name_or_path": str(ROOT)}), encoding="utf-8")
    base, lora = base_of(tmp_path)
    assert (base, lora.rank, lora.targets) == (ROOT, 4, ["q_proj", "v_proj"])
    path.write_text(json.dumps({**told, "base_model_name_or_path": "/gone"}), encoding="utf-8")
    with pytest.raises(ConfigError, match="/gone is not on this machine"):
        base_of(tmp_path)


def test_adapters_of_rows_that_the_engine_reorders_are_not_served(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    tree = {"model_type": "llama4", "text_config": {"model_type": "llama4_text"}}
    (base / "config.json").write_text(json.dumps(tree), encoding="utf-8")
    told = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**told, "base_model_name_or_path": str(base)}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"vLLM has in another order.*run\.py merge"):
        base_of(tmp_path)


@pytest.mark.parametrize("sent", [b"", b"GET /v1/models HTTP/1.1\r\nx: "])
def test_silent_connections_shut_no_client_of_serve_out(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(limits, "MAX_CONNECTIONS", 20)

    async def status_and_closed() -> tuple[int, int]:
        place = bound(0)
        async with serving(FastAPI(), place, key="k") as url:
            connect = asyncio.open_connection
            pairs = [await connect(*place.getsockname()[:2]) for _ in range(40)]
            for _, writer in pairs:
                writer.write(sent)
            headers = {"authorization": "Bearer k"}
            async with aiohttp.ClientSession() as http, http.get(url, headers=headers) as got:
                status = got.status
            closed = 0
            for reader, writer in pairs:
                with contextlib.suppress(TimeoutError, ConnectionError):
                    async with asyncio.timeout(0.05):
                        closed += not await reader.read(1)
                writer.close()
            return status, closed

    status, closed = asyncio.run(status_and_closed())
    assert status == 404  # The key was accepted; the application has no such page.
    assert closed >= 20


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
    of_role = [replace(SMOKE, policy=PolicySection(role=f"opponent-past-{i}")) for i in range(12)]
    assert {with_past_version(each, run_dir).model.path for each in of_role} == {SMOKE.model.path}
    folders = {str(save(run_dir, step)) for step in (10, 20)}
    served = [with_past_version(each, run_dir).model.path for each in of_role]
    assert {*served} == {SMOKE.model.path, *folders}
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
