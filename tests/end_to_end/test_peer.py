"""The comparison with TRL as a user starts it, with TRL itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.venvs import UNREACHABLE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(900),
]  # an environment is made, twice a run


def test_all_sides_train_and_are_scored(tmp_path: Path, repository: Path) -> None:
    path = tmp_path / "peer.json"
    done = subprocess.run(
        [
            *(sys.executable, "run.py", "bench", "--suite", "peer", "--json", str(path)),
            # Long enough for two samples of the CPU time, one every 5 s.
            *(f"run.dir={tmp_path}", "train.num_steps=12", "eval.num_items=8"),
            "study.num_seeds=1",
        ],
        capture_output=True,
        encoding="utf-8",
        timeout=850,
        cwd=repository,
    )
    said = done.stdout + done.stderr
    if done.returncode and any(mark in said for mark in UNREACHABLE):
        pytest.skip(f"the package index does not answer: {said[-300:]}")
    assert done.returncode == 0, said[-3000:]
    rows = {row["name"]: row for row in json.loads(path.read_text(encoding="utf-8"))["rows"]}
    for name in ("this project in lockstep", "this project"):
        for what in ("wall", "CPU"):
            row = rows[f"{name}: {what} s of a step"]
            assert row["value"] > 0
            assert row["limit"] > 0
    for name in ("trl", "this-project-in-lockstep", "this-project"):
        path = tmp_path / "study-peer/seed0" / f"{name}-eval-12" / "eval.json"
        entry = json.loads(path.read_text(encoding="utf-8"))["entries"][-1]
        assert 0 <= entry["overall"]["success"]["mean"] <= 1
    table = (tmp_path / "study-peer" / "table.md").read_text(encoding="utf-8")
    assert "nan" not in table
    assert len(table.splitlines()) == 8  # A mean and a seed of each side.
