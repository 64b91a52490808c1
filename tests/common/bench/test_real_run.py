"""Laws of measurements on real runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

from common.bench.end_to_end import FIRST_STEP, LAST_STEP, window
from common.bench.real_run import cpu_seconds


def test_processor_time_is_told_by_the_role_that_a_command_names(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text("print(sum(range(10**6)), flush=True); input()", encoding="utf-8")
    argv = [sys.executable, str(script), "actor"]
    with subprocess.Popen(argv, stdin=-1, stdout=-1, encoding="utf-8") as process:
        assert process.stdout
        assert process.stdout.readline()
        used = cpu_seconds(os.getpid())
        process.communicate("\n")
    assert used["actor"] > 0


def test_episodes_are_counted_between_two_steps_and_evaluations_are_no_steps(
    tmp_path: Path,
) -> None:
    steps = [
        {"step": n, "wait/batch_s": 0.5, "episodes/arrived": float(n), "time_s": 2.0 * n}
        for n in range(LAST_STEP + 1)
    ]
    lines = [*steps, {"step": LAST_STEP, "eval/success": 0.5}]
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    num_episodes = sum(range(FIRST_STEP + 1, LAST_STEP + 1))
    assert window(path) == (num_episodes, 2.0 * (LAST_STEP - FIRST_STEP))
