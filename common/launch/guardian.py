"""A tiny process that ends the roles when their launcher dies without a word (kill -9).

It reads "+GROUP" and "-GROUP" lines from its standard input. The input ends when the launcher
does; then every group still listed gets SIGTERM and, after a grace, SIGKILL.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

GRACE_S = 5.0
CLOSE_S = 2 * GRACE_S
POLL_S = 0.1  # nothing tells when the last process of a group, none of ours, has ended


class Guardian:
    """The launcher's end of the pipe."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-S", str(Path(__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def add(self, group: int) -> None:
        """End this group if the launcher dies."""
        self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        """This group is gone; its number may soon be somebody else's."""
        self._tell(f"-{group}\n")

    def close(self) -> None:
        """Let the guardian end; it kills what is still listed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:  # stopped, perhaps
            self._process.kill()
            self._process.wait(CLOSE_S)

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        if self._process.poll() is None:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


def signal_group(group: int, number: int) -> bool:
    """Send a signal to a process group; False if nobody is left in it."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def main() -> None:
    """Keep the list until the input ends, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    deadline = time.monotonic() + GRACE_S
    groups = {group for group in groups if signal_group(group, signal.SIGTERM)}
    while groups and time.monotonic() < deadline:
        time.sleep(POLL_S)
        groups = {group for group in groups if signal_group(group, 0)}
    for group in groups:
        signal_group(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
