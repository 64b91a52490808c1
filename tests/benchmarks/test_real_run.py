"""Laws of measurements on real runs."""

import json
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.end_to_end import FIRST_STEP, LAST_STEP, LONG_TAIL, window_s
from benchmarks.real_run import TRAINING_ALONE, cpu_seconds
from common.config.load import load_config
from common.host.guardian import MARKS, find_marked, kill_marked
from common.repository import ROOT


def test_processor_time_is_assigned_by_role(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text("print(sum(range(10**6)), flush=True); input()", encoding="utf-8")
    argv = [sys.executable, str(script), "actor"]
    with subprocess.Popen(argv, stdin=-1, stdout=-1, encoding="utf-8") as process:
        assert process.stdout
        assert process.stdout.readline()
        used = cpu_seconds(os.getpid())
        process.communicate("\n")
    assert used["actor"] > 0


def test_window_excludes_first_steps_and_evaluations(tmp_path: Path) -> None:
    steps = [
        {"step": n, "wait/batch_s": 0.5, "time_s": 2.0 * n + 100.0 * (n >= FIRST_STEP)}
        for n in range(LAST_STEP + 1)
    ]
    lines = [*steps, {"step": LAST_STEP, "eval/success": 0.5, "time_s": 900.0}]
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert window_s(path) == 2.0 * (LAST_STEP - FIRST_STEP)


@pytest.mark.slow
def test_runs_with_a_long_tail_have_a_valid_configuration() -> None:
    cfg = load_config("quickstart", [*TRAINING_ALONE, *LONG_TAIL])
    assert cfg.envs.plugins["tail_factor"] == "10"
    assert [task.env for task in cfg.tasks] == ["slow"]


STUDY = """
import sys
from pathlib import Path
from benchmarks.real_run import train
train("run", ["log.wandb=disabled"], folder=Path(sys.argv[1]), timeout_s=600, config="smoke")
"""


@pytest.mark.slow
def test_killed_study_leaves_no_processes(tmp_path: Path) -> None:
    mark = secrets.token_hex(16)
    argv = [sys.executable, "-c", STUDY, str(tmp_path)]
    study = subprocess.Popen(argv, env={**os.environ, MARKS: mark}, cwd=ROOT)
    try:
        deadline = time.monotonic() + 120.0
        while not (tmp_path / "run" / "logs" / "learner.log").exists():  # all roles are started
            assert time.monotonic() < deadline
            time.sleep(0.1)
        study.kill()
        while find_marked(mark):
            assert time.monotonic() < deadline, "a process of the killed study still runs"
            time.sleep(0.1)
    finally:
        study.kill()
        study.wait()
        kill_marked(mark)
