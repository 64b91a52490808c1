"""A synchronous run whose engine sleeps while the learner steps: every role is a real process.

vLLM's CPU worker accepts the calls of its sleep mode and keeps its memory. A start without a GPU
refuses `actor.sleep`, so `nvidia-smi` is a script here.
"""

import os
import re
from datetime import datetime
from pathlib import Path

import pytest

from tests.end_to_end.runs import Run, balances

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

NUM_STEPS = 3


def path_with_a_gpu(folder: Path) -> str:
    """Return a PATH on which nvidia-smi lists one GPU."""
    script = folder / "bin" / "nvidia-smi"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\necho 'GPU-0, NVIDIA H100, 81559'\n", encoding="utf-8")
    script.chmod(0o755)
    return f"{script.parent}:{os.environ['PATH']}"


def times_of(log: Path, pattern: str) -> list[datetime]:
    """Return the times of the lines of a log that contain a pattern."""
    lines = [line for line in log.read_text(encoding="utf-8").splitlines() if re.search(pattern, line)]
    return [datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f") for line in lines]


def test_engine_sleeps_during_each_step_and_no_lease_expires(tmp_path: Path) -> None:
    overrides = ("train.mode=sync", "actor.placement=colocated", "actor.sleep=1")
    more = (f"train.num_steps={NUM_STEPS}", "learner.batch_timeout_s=400")
    env = {"PATH": path_with_a_gpu(tmp_path)}
    with Run(tmp_path, *overrides, *more, env=env) as run:
        assert run.wait(timeout_s=800) == 0, run.output
        assert run.left_over() == []
    logs = run.root / "logs"
    asleep = times_of(logs / "actor-0.log", "engine sleeps level=1")
    stepped = times_of(logs / "learner.log", r" step=\d+ success=")
    awake = times_of(logs / "actor-0.log", r"engine is awake version=\d+")
    assert len(asleep) == len(stepped) == len(awake) == NUM_STEPS
    turns = [time for each in zip(asleep, stepped, awake, strict=True) for time in each]
    assert turns == sorted(turns)  # Asleep, a step, awake, and again.
    metrics = run.metrics()
    assert [line["offpolicy/lag_max"] for line in metrics] == [0.0] * NUM_STEPS
    ledger = run.read("ledger.json")
    assert balances(ledger)
    assert (ledger["failed"], ledger["stale"]) == (0, 0)
