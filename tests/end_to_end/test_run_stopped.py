"""Runs that are asked to stop, and go on."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.end_to_end.runs import Run, balances

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_stopped_run_leaves_nothing_and_goes_on_at_the_next_step(tmp_path: Path) -> None:
    overrides = ("train.num_steps=200", "eval.before=false", "eval.after=false")
    with Run(tmp_path, *overrides) as run:
        run.wait_until(lambda: len(run.metrics()) >= 2)
        run.process.send_signal(signal.SIGTERM)
        started = time.monotonic()
        assert run.wait(timeout_s=15) != 0
        assert time.monotonic() - started < 10.0
        assert run.left_over() == []
    reached = run.metrics()[-1]["step"]
    saved = sorted((run.root / "checkpoints").glob("step-*"))[-1]
    assert json.loads((saved / "COMPLETE").read_text())["version"] >= reached
    with Run(tmp_path, f"train.num_steps={reached + 3}", *overrides[1:]) as again:
        assert again.wait() == 0, again.output
    steps = [line["step"] for line in again.metrics()]
    assert steps == list(range(1, reached + 4))
    assert balances(again.read("ledger.json"))


def test_learner_that_takes_long_to_stop_still_saves(tmp_path: Path) -> None:
    overrides = ("train.num_steps=200", "eval.before=false", "eval.after=false")
    with Run(tmp_path, *overrides) as run:
        run.wait_until(lambda: len(run.metrics()) >= 2)
        learner = run.role_pid("learner")
        os.kill(learner, signal.SIGSTOP)  # as in a step of a large model
        reached = run.metrics()[-1]["step"]
        run.process.send_signal(signal.SIGINT)
        time.sleep(8.0)
        os.kill(learner, signal.SIGCONT)
        assert run.wait(timeout_s=60) == 130
        assert run.left_over() == []
    saved = sorted((run.root / "checkpoints").glob("step-*"))[-1]
    version = json.loads((saved / "COMPLETE").read_text())["version"]
    assert version >= reached
    assert f"saved at step {version}; the same command goes on" in run.output
    assert "Ctrl-C again stops at once" in run.output
    assert "error" not in run.output.splitlines()[-1]
