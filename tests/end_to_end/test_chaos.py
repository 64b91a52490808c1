"""A run that loses every role, its connections and its disk."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.runs import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1500)]

TIMEOUT_S = 1_200.0
MIN_FAULTS = 8
HAPPENED = {"clock jumps"}  # It needs no administrator rights.


def test_faults_neither_lose_nor_repeat_episodes(tmp_path: Path) -> None:
    path = tmp_path / "chaos.json"
    done = subprocess.run(
        [sys.executable, "run.py", "bench", "--suite", "chaos-short", "--json", str(path)],
        cwd=REPOSITORY,
        capture_output=True,
        encoding="utf-8",
        timeout=TIMEOUT_S,
        check=False,
    )
    report = json.loads(path.read_text(encoding="utf-8"))
    said = done.stdout + done.stderr
    assert "chaos" not in report["failed"], said  # it made all its steps, and ended well
    values = {row["name"]: row["value"] for row in report["rows"]}
    assert values["faults"] >= MIN_FAULTS, said
    assert values["episodes lost"] == 0, said
    assert values["episodes trained twice"] == 0, said
    assert values["steps made"] == values["steps wanted"], said
    happened = {name.removeprefix("recovery, ") for name in values}
    assert happened >= HAPPENED, said
    roles = {name.removeprefix("recovery, kill -9: ") for name in values if "kill -9" in name}
    assert roles == {"scheduler", "learner", "envhub", "actor"}, said
