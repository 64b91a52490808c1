"""A small process that ends the children of a parent that was killed with SIGKILL.

It reads lines from its standard input: "+g123" adds a process group, "+mabc" adds a mark, "-"
removes either. The input ends when the parent ends. Then each listed group gets SIGTERM and, after
a grace period, SIGKILL. Every process with a listed mark in its environment gets SIGKILL.
"""

import atexit
import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

GRACE_S = 5.0
CLOSE_S = 2 * GRACE_S
POLL_S = 0.1  # Polling interval; there is no event for the end of a group of foreign processes.
MARKS = "LONGSTRIDE_MARKS"  # Environment variable; a child appends its own mark to its parent's.
MAX_SEARCHES = 20  # Searches for marked processes, since a killed one may have started another.


class Guardian:
    """The parent's interface to its guardian process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-S", str(Path(__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def add(self, group: int) -> None:
        """Make the guardian end this process group if the parent dies."""
        self._send_line(f"+g{group}\n")

    def remove(self, group: int) -> None:
        """Remove this process group. It has ended, and the kernel may reuse its number."""
        self._send_line(f"-g{group}\n")

    def add_mark(self, mark: str) -> None:
        """End all processes with this mark, including later ones, if the parent dies."""
        self._send_line(f"+m{mark}\n")

    def remove_mark(self, mark: str) -> None:
        """Remove this mark. No process has it any more."""
        self._send_line(f"-m{mark}\n")

    def close(self) -> None:
        """End the guardian. It kills the processes that are still listed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:  # The guardian may be stopped by a signal.
            self._process.kill()
            self._process.wait(CLOSE_S)

    def _send_line(self, line: str) -> None:
        """Send a line to the guardian process, unless it has ended, is closed or ends just now."""
        stdin = self._process.stdin
        assert stdin is not None
        if stdin.closed or self._process.poll() is not None:
            return
        with contextlib.suppress(BrokenPipeError):
            stdin.write(line.encode())
            stdin.flush()


def shared_guardian() -> Guardian:
    """Return this process's guardian for all children without their own guardian."""
    return _guardian_of(os.getpid())  # A fork must not write to the pipe of its parent.


@functools.cache
def _guardian_of(_pid: int) -> Guardian:
    """Return the guardian of this process; a fork gets its own."""
    guardian = Guardian()
    atexit.register(guardian.close)
    return guardian


def signal_group(group: int, number: int) -> bool:
    """Send a signal to a process group; False if the group is empty."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def marks_with(mark: str) -> str:
    """Return the value of `MARKS` for a child with this mark."""
    return ":".join(filter(None, [os.environ.get(MARKS, ""), mark]))


@contextlib.contextmanager
def inheriting(mark: str) -> Generator[None]:
    """Give the mark to all processes that this process starts within the block."""
    before = os.environ.get(MARKS)
    os.environ[MARKS] = marks_with(mark)
    try:
        yield
    finally:
        os.environ.pop(MARKS)
        if before is not None:
            os.environ[MARKS] = before


def find_marked(*wanted: str) -> list[int]:
    """Return the ids of all processes whose environment contains one of these marks.

    It reads /proc; the result is empty on a machine without /proc.
    """
    start = f"{MARKS}=".encode()
    marks = {mark.encode() for mark in wanted}
    process_ids: list[int] = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = environ.read_bytes().split(b"\0")
        except OSError:  # The process has ended, or belongs to another user.
            continue
        value = next((v.removeprefix(start) for v in variables if v.startswith(start)), b"")
        if not marks.isdisjoint(value.split(b":")):
            process_ids.append(int(environ.parent.name))
    return process_ids


def kill_marked(*marks: str) -> None:
    """Kill all processes with one of these marks, including ones that start during the search."""
    for _ in range(MAX_SEARCHES):
        pids = find_marked(*marks) if marks else []
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)


def _end(groups: set[int], marks: set[str]) -> None:
    """End the groups with a grace period, then kill all marked processes."""
    deadline = time.monotonic() + GRACE_S
    groups = {group for group in groups if signal_group(group, signal.SIGTERM)}
    while groups and time.monotonic() < deadline:
        time.sleep(POLL_S)
        groups = {group for group in groups if signal_group(group, 0)}
    for group in groups:
        signal_group(group, signal.SIGKILL)
    kill_marked(*marks)


def main() -> None:
    """Maintain the lists until the input ends, then end the listed processes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    listed: set[str] = set()
    for line in sys.stdin:
        name = line[1:].strip()
        (listed.add if line[0] == "+" else listed.discard)(name)
    groups = {int(name[1:]) for name in listed if name[0] == "g"}
    _end(groups, {name[1:] for name in listed if name[0] == "m"})


if __name__ == "__main__":
    main()
