"""Runs whose learner is two processes, on one node or on two."""

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from common.host.child_process import ChildProcess
from common.repository import ROOT
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


def join_learner(run: Run, log: Path) -> ChildProcess:
    """Start the second node of the learner."""
    address = (run.root / "addresses" / "scheduler").read_text(encoding="utf-8")
    key = run.root / "keys" / "ranks-1.key"
    joins = ("--join", address.removeprefix("tcp://"), "--key", str(key))
    argv = [sys.executable, str(ROOT / "run.py"), "learner", *joins]
    return ChildProcess("node", argv, log_path=log, cwd=ROOT)


def test_lost_learner_node_is_named_and_the_learner_restarts(tmp_path: Path) -> None:
    overrides = ("learner.num_nodes=2", "train.num_steps=5", "eval.before=false")
    patient = ("learner.batch_timeout_s=400", "eval.after=false", "scheduler.dead_after_s=10")
    nodes: list[ChildProcess] = []
    with Run(tmp_path, *overrides, *patient) as run:
        try:
            run.wait_until((run.root / "keys" / "ranks-1.key").exists, timeout_s=400)
            nodes.append(join_learner(run, tmp_path / "first.txt"))
            run.wait_until(lambda: len(run.metrics()) >= 2, timeout_s=400)
            nodes[0].clear_away()
            nodes.append(join_learner(run, tmp_path / "second.txt"))
            assert run.wait(timeout_s=400) == 0, run.output
            assert run.left_over() == []
            nodes[1].wait_until(lambda: nodes[1].poll() is not None, timeout_s=100)
            assert nodes[1].poll() == 0, (tmp_path / "second.txt").read_text(encoding="utf-8")
        finally:
            for node in nodes:
                node.clear_away()
    log = (run.root / "logs" / "learner.log").read_text(encoding="utf-8")
    assert "learner node 1 (" in log
    assert log.count("ranks=2 pids=") == 2
    assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4, 5]
    assert balances(run.read("ledger.json"))
