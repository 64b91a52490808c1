"""A run whose learner is two processes."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.runs import Run, balances

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]


def rank_worker_pids(run: Run) -> list[int]:
    """Return the processes that the learner has started as its other ranks."""
    try:
        children = psutil.Process(run.role_pid("learner")).children()
    except psutil.NoSuchProcess:
        return []
    return [child.pid for child in children if "spawn_main" in " ".join(child.cmdline())]


def test_dead_rank_restarts_the_two_rank_learner(tmp_path: Path) -> None:
    overrides = ("learner.num_ranks=2", "train.num_steps=6", "eval.before=false")
    patient = ("learner.batch_timeout_s=400", "eval.after=false")
    with Run(tmp_path, *overrides, *patient) as run:
        run.wait_until(lambda: len(run.metrics()) >= 2, timeout_s=400)
        (pid,) = rank_worker_pids(run)
        os.kill(pid, signal.SIGKILL)
        assert run.wait(timeout_s=400) == 0, run.output
        assert run.left_over() == []
    log = (run.root / "logs" / "learner.log").read_text(encoding="utf-8")
    assert log.count("ranks=2 pids=") == 2
    assert "learner rank" in log
    assert "role ended role=learner" in run.output
    assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4, 5, 6]
    assert balances(run.read("ledger.json"))
