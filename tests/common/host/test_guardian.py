"""Laws of the process that ends the roles of a launcher that died."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from common.host import guardian
from common.host.guardian import Guardian

WAIT_S = 30.0


def test_guardian_terminates_only_listed_processes_at_end() -> None:
    keeper = Guardian()
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    listed, removed = (subprocess.Popen(sleep, start_new_session=True) for _ in range(2))
    try:
        keeper.add(listed.pid)
        keeper.add(removed.pid)
        keeper.remove(removed.pid)
        assert keeper._process.stdin is not None
        keeper._process.stdin.close()  # as the end of its launcher does
        assert listed.wait(WAIT_S) == -signal.SIGTERM
        keeper.close()
        assert removed.poll() is None
    finally:
        for process in (listed, removed):
            process.kill()
            process.wait(WAIT_S)


def test_hung_guardian_is_killed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guardian, "CLOSE_S", 0.5)
    keeper = Guardian()
    pid = keeper._process.pid
    os.kill(pid, signal.SIGSTOP)
    keeper.close()
    assert not psutil.pid_exists(pid)


def test_closed_guardian_ignores_late_entries() -> None:
    keeper = Guardian()
    keeper.close()
    keeper.add_mark("a")
    keeper.remove_mark("a")


def test_entry_for_a_guardian_that_was_just_killed_is_dropped() -> None:
    keeper = Guardian()
    os.kill(keeper._process.pid, signal.SIGKILL)
    keeper.add_mark("a" * 100_000)
    keeper.close()
