"""Laws of a run whose disk is lost, and of its metrics while it works."""

import shutil
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from learner.recovery.step_log import read_steps
from tests.end_to_end.runs import Run, balances, unbounded
from tests.ports import free_port
from tools.copies.fetch import fetch
from tools.copies.store import ObjectStore

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]

NUM_STEPS = 16


def overrides(tmp_path: Path, port: int) -> tuple[str, ...]:
    return (
        *(f"train.num_steps={NUM_STEPS}", "eval.before=false", "eval.after=false"),
        *("learner.checkpoint_every_steps=4", f"journal.copy_to={tmp_path}/copies"),
        *("journal.copy_every_s=0.5", f"log.metrics_port={port}"),
    )


def copied_step(copies: Path) -> int:
    """Return the newest checkpoint in the only copy; -1 without one."""
    folders = [*copies.iterdir()] if copies.is_dir() else []
    manifest = ObjectStore(str(folders[0])).newest_manifest() if folders else None
    return manifest.checkpoint if manifest else -1


def roles_in_metrics(run: Run, port: int) -> set[str]:
    """Return the live roles in the run's metrics, which must be valid."""
    token = (run.root / "keys" / "metrics_token").read_text(encoding="utf-8").strip()
    request = Request(
        f"http://127.0.0.1:{port}/metrics", headers={"Authorization": f"Bearer {token}"}
    )
    with urlopen(request, timeout=120) as answer:
        families = [*text_string_to_metric_families(answer.read().decode())]
    up = next(each for each in families if each.name == "longstride_member_up")
    assert all(sample.labels["node"] for sample in up.samples)
    assert any(each.name == "longstride_copy_lag_bytes" for each in families)
    assert any(each.name == "longstride_step_train_step_s" for each in families)
    return {sample.labels["role"] for sample in up.samples if sample.value == 1}


def test_run_continues_from_its_copy_after_its_disk_is_lost(tmp_path: Path) -> None:
    port = free_port()
    words = overrides(tmp_path, port)
    with Run(tmp_path, *words) as first:
        first.wait_until(lambda: copied_step(tmp_path / "copies") >= 4)
        assert roles_in_metrics(first, port) == {"scheduler", "learner", "actor", "envhub"}
        assert "copy/lag_bytes" in first.metrics()[-1]
        first.process.kill()  # The end of the block kills the roles.
    shutil.rmtree(first.root)
    root = fetch(f"{tmp_path}/copies", tmp_path)
    assert root == first.root
    with Run(tmp_path, *words) as second:
        assert second.wait() == 0
    assert [line["step"] for line in second.metrics()] == [*range(1, NUM_STEPS + 1)]
    ledger = second.read("ledger.json")
    assert balances(ledger)
    assert ledger["unknown_reports"] == 0
    trained = [
        name
        for step in read_steps(second.root / "journal" / "steps.jsonl")
        if not step.is_skipped
        for ids in step.groups
        for name in ids
    ]
    assert len(trained) == len({*trained})
    assert unbounded(second.root) == []
    assert "is complete" in second.output
    folders = {each.name: each for each in (tmp_path / "copies").iterdir()}
    assert len(folders) == 2  # The restored run has a copy of its own.
    last = max(folders.values(), key=lambda each: each.stat().st_mtime)
    manifest = ObjectStore(str(last)).newest_manifest()
    assert manifest is not None
    assert manifest.checkpoint == NUM_STEPS
    assert "finished.json" in manifest.files
