"""Laws of the process in which an evaluation plays with its engine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.repository import ROOT

CODE = """
import multiprocessing, os, signal, sys
from tools.evaluate.own_process import start_tracker

def die():
    held = multiprocessing.Lock()
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    start_tracker()
    assert "PYTHONWARNINGS" not in os.environ
    process = multiprocessing.get_context("spawn").Process(target=die)
    process.start()
    process.join()
    print(process.exitcode)
"""


@pytest.mark.slow
def test_killed_process_leaves_no_warning_about_its_semaphores(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(CODE, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONWARNINGS", None)
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    assert (done.stdout, done.stderr) == ("-9\n", "")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_engine_is_gone_before_the_interpreter_ends(tmp_path: Path) -> None:
    words = ["eval", "--config", "smoke", "model.path=configs/policies/tiny", "eval.num_items=2"]
    done = subprocess.run(
        [sys.executable, "run.py", *words, f"run.dir={tmp_path}", "run.name=e"],
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Exception ignored" not in done.stderr
