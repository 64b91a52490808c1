"""Runs of which a role is killed."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common.store.journal import read_journal
from tests.end_to_end.runs import REPOSITORY, Run, balances, unbounded

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_killed_learner_rereads_only_unsettled_episodes(tmp_path: Path) -> None:
    overrides = ("train.num_steps=18", "eval.before=false", "eval.after=false")
    checkpoints = ("learner.checkpoint_every_steps=2", "learner.keep_checkpoints=1")

    def is_behind_the_start(run: Run) -> bool:
        path = run.root / "journal" / "replay_point.json"
        return (
            path.exists() and json.loads(path.read_text(encoding="utf-8"))["position"]["offset"] > 0
        )

    with Run(tmp_path, *overrides, *checkpoints) as run:
        run.wait_until(lambda: is_behind_the_start(run))
        num_before = sum(1 for _ in read_journal(run.root / "journal"))
        os.kill(run.role_pid("learner"), signal.SIGKILL)
        assert run.wait() == 0, run.output
        assert run.left_over() == []
    log = (run.root / "logs" / "learner.log").read_text(encoding="utf-8")
    (num_read,) = re.findall(r"journal from=.* episodes=(\d+)", log)
    assert int(num_read) < num_before
    assert [line["step"] for line in run.metrics()] == list(range(1, 19))
    assert balances(run.read("ledger.json"))
    assert unbounded(run.root) == []
    logged = (run.root / "journal" / "steps.jsonl").read_text(encoding="utf-8")
    steps = [json.loads(text) for text in logged.splitlines()]
    trained = [name for step in steps for group in step["groups"] for name in group]
    assert len(set(trained)) == len(trained) == run.read("ledger.json")["trained"]
    argv = [sys.executable, "run.py", "recompute", str(run.root)]
    again = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, encoding="utf-8", timeout=200)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "equal: all 19 checksums of weights, versions 0 to 18" in again.stdout
