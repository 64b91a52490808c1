"""Laws of a process that leaves at once."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from common.repository import ROOT

LEAVES = """
import multiprocessing
from common.quick_exit import leave

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
    done = subprocess.run(argv, env=env, capture_output=True, encoding="utf-8", timeout=240)
    assert (done.returncode, done.stderr) == (3, "")


BLOCKED = """
import asyncio, signal, subprocess, sys, time
from common.quick_exit import end_during_start

async def start():
    engine = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    print(engine.pid, flush=True)
    time.sleep(600)  # The event loop is blocked.

signal.signal(signal.SIGTERM, end_during_start)
asyncio.run(start())
"""


def test_sigterm_ends_a_blocked_start_and_its_children() -> None:
    command = [sys.executable, "-c", BLOCKED]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, encoding="utf-8") as process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        process.terminate()
        assert process.wait(120.0) == 0
    with suppress(psutil.NoSuchProcess):
        child.wait(120.0)
