"""One child process in a session of its own, with its log, its group and what it started."""

import contextlib
import os
import secrets
import signal
import subprocess
import time
from pathlib import Path

from common.launch.base import RoleSpec

MAX_TAIL_BYTES = 16_384
MARK = "LONGSTRIDE_ROLE_MARK"  # environment variable that a role hands down to its children


class RoleProcess:
    """A started role."""

    def __init__(self, spec: RoleSpec) -> None:
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        self.spec = spec
        self._mark = secrets.token_hex(16)
        with spec.log_path.open("ab") as log:
            self._log_offset = log.tell()
            self._process = subprocess.Popen(
                spec.argv,
                env={**os.environ, **spec.env, MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process id, which is also the id of its group."""
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit code (negative: minus the signal), None while it runs."""
        return self._process.poll()

    def terminate(self) -> None:
        """Ask the role itself, not its children, to end."""
        if self.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def clear_away(self) -> None:
        """Kill at once whatever is left: the role, its group, all that it ever started."""
        kill_group(self.pid, signal.SIGKILL)
        for pid in find_marked(self._mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def log_tail(self, *, max_lines: int) -> list[str]:
        """Return the last lines that this process, not an earlier one, wrote to its log."""
        with self.spec.log_path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_offset, size - MAX_TAIL_BYTES))
            text = log.read().decode(errors="replace")
        return [line for line in text.splitlines() if line.strip()][-max_lines:]


def kill_group(group: int, number: signal.Signals) -> bool:
    """Send a signal to a process group; False if nobody is left in it."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def find_marked(mark: str) -> list[int]:
    """Return the ids of all processes started with this mark in their environment.

    A child inherits the mark, so it is found even after it left its group and lost its parent.
    Reads /proc; empty on a machine without one.
    """
    wanted = f"{MARK}={mark}".encode()
    found: list[int] = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in environ.read_bytes().split(b"\0"):
                found.append(int(environ.parent.name))
        except OSError:  # it ended meanwhile, or is another user's
            continue
    return found


def wait_until_ended(processes: list[RoleProcess], *, deadline: float, poll_s: float) -> bool:
    """Wait for processes to end by themselves; False if `deadline` (monotonic) came first."""
    while any(process.poll() is None for process in processes):
        if time.monotonic() >= deadline:
            return False
        time.sleep(poll_s)
    return True
