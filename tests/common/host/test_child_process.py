"""Laws of a supervised child process, with real processes of a few lines."""

import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.host.child_process import ChildFailed, ChildProcess
from common.host.guardian import MARKS, find_marked, kill_marked
from common.repository import ROOT
from tests.bounds import at_most
from tests.processes import is_gone

IGNORES_TERM = """
import signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], 'w').close()
while True: signal.pause()
"""
STAYS = "import signal, sys; open(sys.argv[1], 'w').close(); signal.pause()"
NESTED = """
import sys
from pathlib import Path
from common.host.guardian import MARKS, find_marked, kill_marked
from common.host.child_process import ChildProcess
inner = ChildProcess("inner", [sys.executable, "-S", "-c", sys.argv[1], sys.argv[2]])
inner.wait_until(Path(sys.argv[2]).exists, timeout_s=20)
Path(sys.argv[3]).write_text(str(inner.pid))
inner.wait_until(lambda: False, timeout_s=60)
"""


def start(tmp_path: Path, code: str, *args: object) -> ChildProcess:
    argv = [sys.executable, "-c", code, *map(str, args)]
    return ChildProcess("child", argv, log_path=tmp_path / "logs" / "child.log", cwd=ROOT)


@pytest.fixture
def ready(tmp_path: Path) -> Path:
    return tmp_path / "ready"


def test_wait_for_ended_child_raises_last_lines(tmp_path: Path) -> None:
    child = start(tmp_path, "print('no such device'); raise SystemExit(3)")
    try:
        with pytest.raises(ChildFailed, match=r"exit code 3\n  no such device") as error:
            child.wait_until(lambda: False, timeout_s=20.0)
        assert str(tmp_path / "logs" / "child.log") in str(error.value)
    finally:
        child.clear_away()


def test_wait_for_a_child_has_a_deadline(tmp_path: Path, ready: Path) -> None:
    child = start(tmp_path, STAYS, ready)
    try:
        child.wait_until(ready.exists, timeout_s=20.0)
        with pytest.raises(ChildFailed, match=r"child: not ready within 0\.1 s"):
            child.wait_until(lambda: False, timeout_s=0.1)
    finally:
        assert child.stop(timeout_s=10.0)


def test_child_ignoring_termination_is_killed_in_time(tmp_path: Path, ready: Path) -> None:
    child = start(tmp_path, IGNORES_TERM, ready)
    child.wait_until(ready.exists, timeout_s=20.0)
    began = time.monotonic()
    assert not child.stop(timeout_s=0.3)
    assert 0.3 <= time.monotonic() - began < at_most(5.0)
    assert child.poll() == -9


def test_nested_children_with_own_sessions_die_together(tmp_path: Path, ready: Path) -> None:
    pid_file = tmp_path / "pid"
    outer = start(tmp_path, NESTED, STAYS, ready, pid_file)
    try:
        outer.wait_until(lambda: pid_file.exists() and pid_file.stat().st_size > 0, timeout_s=30.0)
    finally:
        outer.clear_away()
    inner = int(pid_file.read_text(encoding="utf-8"))
    deadline = time.monotonic() + 30.0
    while not is_gone(inner):
        assert time.monotonic() < deadline, "the inner child lives on"
        time.sleep(0.01)


def test_second_child_log_excludes_the_first(tmp_path: Path, ready: Path) -> None:
    first = start(tmp_path, "print('first')")
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
    second = start(tmp_path, f"print('second', flush=True); {STAYS}", ready)
    try:
        second.wait_until(ready.exists, timeout_s=20.0)
        assert second.log_tail(max_lines=5) == ["second"]
    finally:
        second.stop(timeout_s=10.0)
        first.clear_away()


WITHOUT_GUARDIAN = """
import subprocess, sys
argv = [sys.executable, "-S", "-c", sys.argv[1], sys.argv[2]]
subprocess.Popen(argv, start_new_session=True).wait()
"""
STARTS_A_CHILD = """
import sys
from common.host.guardian import MARKS, find_marked, kill_marked
from common.host.child_process import ChildProcess
child = ChildProcess("child", [sys.executable, "-c", *sys.argv[1:]])
child.wait_until(lambda: False, timeout_s=60)
"""


def test_killed_parent_leaves_no_descendants(tmp_path: Path, ready: Path) -> None:
    mark = secrets.token_hex(16)
    argv = [sys.executable, "-c", STARTS_A_CHILD, WITHOUT_GUARDIAN, STAYS, str(ready)]
    parent = subprocess.Popen(argv, env={**os.environ, MARKS: mark}, cwd=ROOT)
    try:
        deadline = time.monotonic() + 120.0
        while not ready.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert len(find_marked(mark)) == 4  # parent, guardian, child, grandchild
        parent.kill()
        while find_marked(mark):
            assert time.monotonic() < deadline, "a descendant of the killed parent still runs"
            time.sleep(0.01)
    finally:
        parent.kill()
        parent.wait()
        kill_marked(mark)
