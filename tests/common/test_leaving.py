"""Laws of a process that leaves at once."""

import os
import subprocess
import sys
from pathlib import Path

from common.repository import ROOT

LEAVES = """
import multiprocessing
from common.leaving import leave

def serve():
    kept = multiprocessing.get_context("spawn").RLock()  # as tqdm's, which torch.compile loads
    leave(3)

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=serve)
    process.start()
    process.join()
    raise SystemExit(process.exitcode)
"""


def test_immediate_exit_leaks_no_semaphores(tmp_path: Path) -> None:
    script = tmp_path / "leaves.py"
    script.write_text(LEAVES, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, str(script)]
    done = subprocess.run(argv, env=env, capture_output=True, encoding="utf-8", timeout=60)
    assert (done.returncode, done.stderr) == (3, "")
