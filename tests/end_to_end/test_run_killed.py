"""Runs of which a role is killed."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

from common.store.journal import read_journal
from tests.end_to_end.runs import Run, balances

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_killed_actor_is_restarted_and_no_episode_is_lost(tmp_path: Path) -> None:
    with Run(tmp_path, "train.num_steps=6", "eval.before=false") as run:
        run.wait_until(lambda: len(run.metrics()) >= 1)
        os.kill(run.role_pid("actor"), signal.SIGKILL)
        assert run.wait() == 0, run.output
        assert run.left_over() == []
    assert "exit" in run.output or "restart" in run.output
    ledger = run.read("ledger.json")
    assert balances(ledger)
    assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4, 5, 6]


def test_killed_learner_repeats_its_logged_steps_and_loses_nothing(tmp_path: Path) -> None:
    overrides = ("train.num_steps=8", "eval.before=false", "learner.checkpoint_every_steps=100")
    with Run(tmp_path, *overrides) as run:
        run.wait_until(lambda: len(run.metrics()) >= 3)
        os.kill(run.role_pid("learner"), signal.SIGKILL)
        assert run.wait() == 0, run.output
    log = (run.root / "logs" / "learner.log").read_text()
    assert "repeated step=" in log
    assert [line["step"] for line in run.metrics()][-1] == 8
    assert balances(run.read("ledger.json"))


def test_learner_killed_late_reads_only_what_is_not_settled(tmp_path: Path) -> None:
    overrides = ("train.num_steps=30", "eval.before=false", "eval.after=false")
    checkpoints = ("learner.checkpoint_every_steps=2", "learner.keep_checkpoints=1")

    def is_behind_the_start(run: Run) -> bool:
        path = run.root / "journal" / "replay_point.json"
        return path.exists() and json.loads(path.read_text())["position"]["offset"] > 0

    with Run(tmp_path, *overrides, *checkpoints) as run:
        run.wait_until(lambda: is_behind_the_start(run))
        num_before = sum(1 for _ in read_journal(run.root / "journal"))
        os.kill(run.role_pid("learner"), signal.SIGKILL)
        assert run.wait() == 0, run.output
        assert run.left_over() == []
    log = (run.root / "logs" / "learner.log").read_text()
    (num_read,) = re.findall(r"journal from=.* episodes=(\d+)", log)
    assert int(num_read) < num_before
    assert [line["step"] for line in run.metrics()] == list(range(1, 31))
    assert balances(run.read("ledger.json"))
    logged = (run.root / "journal" / "steps.jsonl").read_text()
    steps = [json.loads(text) for text in logged.splitlines()]
    trained = [name for step in steps for group in step["groups"] for name in group]
    assert len(set(trained)) == len(trained) == run.read("ledger.json")["trained"]
