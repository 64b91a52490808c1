"""Laws of a whole run that learns from an engine of a teacher that the run starts itself."""

import os
import signal
from pathlib import Path

import pytest

from tests.end_to_end.runs import Run, balances, unbounded

OVERRIDES = (
    "train.num_steps=6",
    "groups.per_step=2",
    "eval.before=false",
    "eval.after=false",
    "eval.baselines=false",
    "actor.max_concurrent=16",
    "log.wandb=disabled",
    "log.live=false",
)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("form", ["sampled", "topk"])
def test_killed_teacher_delays_a_run_and_falsifies_nothing(tmp_path: Path, form: str) -> None:
    own = f"algorithm.teacher.form={form}"
    with Run(tmp_path, *OVERRIDES, own, config="teacher") as run:
        run.wait_until(lambda: len(run.metrics()) >= 1, timeout_s=900)
        os.kill(run.role_pid("serve"), signal.SIGKILL)
        log = run.root / "logs" / "learner.log"
        run.wait_until(lambda: "is down: Client" in log.read_text(encoding="utf-8"), timeout_s=300)
        assert run.wait(timeout_s=900) == 0, run.output[-3000:]
        lines = run.metrics()
        assert len(lines) == 6
        assert all("teacher/kl" in line for line in lines)
        assert sum(line["teacher/tokens"] for line in lines) > 0
        assert sum(line["teacher/down_s"] for line in lines) > 1.0
        ledger = run.read("ledger.json")
        assert balances(ledger)
        assert ledger["failed"] == ledger["lost"] == ledger["filtered"] == 0
        assert unbounded(run.root) == []


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_learner_trains_waiting_episodes_once(tmp_path: Path) -> None:
    with Run(tmp_path, *OVERRIDES, config="teacher") as run:
        run.wait_until(lambda: len(run.metrics()) >= 2, timeout_s=900)
        os.kill(run.role_pid("learner"), signal.SIGKILL)
        assert run.wait(timeout_s=900) == 0, run.output[-3000:]
        assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4, 5, 6]
        ledger = run.read("ledger.json")
        assert balances(ledger)
        assert ledger["lost"] == 0
