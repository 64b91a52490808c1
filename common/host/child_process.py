"""A child process in its own session, with its log, its process group and its descendants."""

import contextlib
import logging
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from common.errors import LongstrideError
from common.host.guardian import (
    MARKS,
    Guardian,
    find_marked,
    marks_with,
    shared_guardian,
    signal_group,
)

logger = logging.getLogger(__name__)

KILLED_S = 5.0  # Time from SIGKILL to the end of a process that is not stuck.
MAX_TAIL_BYTES = 16_384
TAIL_LINES = 15  # Lines of a child's log that an error message quotes.
ERROR = "error: "  # Prefix of the line that holds a command's error message.
POLL_S = 0.02  # Polling interval; there is no portable event for a new file.


class ChildFailed(LongstrideError):
    """A child process ended or missed its deadline; the message holds its last log lines."""


class ChildProcess:
    """A started child with closed stdin, its own session and its own process group.

    Every descendant inherits the child's mark. `clear_away` therefore also finds descendants that
    left the group and lost their parent (a browser, an engine). A guardian process ends them all
    if this process is killed.

    Example:
        child = ChildProcess("hub", argv, log_path=log)
        try:
            child.wait_until(address.exists, timeout_s=60)
        finally:
            child.stop(timeout_s=5)
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        log_path: Path | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        pass_fds: Sequence[int] = (),
        guardian: Guardian | None = None,
    ) -> None:
        """Start the child.

        Args:
            name: used in messages, such as "actor-0".
            log_path: receives stdout and stderr in append mode; None: this process's own streams.
            env: variables that are added to this process's own.
            pass_fds: file descriptors that stay open in the child.
            guardian: ends the child if this process is killed. None: the guardian that all such
                children of this process share.
        """
        self.name = name
        self.log_path = log_path
        self._guardian: Guardian | None = guardian or shared_guardian()
        self._mark = secrets.token_hex(16)
        self._guardian.add_mark(self._mark)  # The child is guarded from its start on.
        with contextlib.ExitStack() as stack:
            log = None
            if log_path is not None:
                log_path.parent.mkdir(parents=True, exist_ok=True)
                log = stack.enter_context(log_path.open("ab"))
            self._log_offset = log.tell() if log else 0
            self._process = subprocess.Popen(
                argv,
                env={**os.environ, **(env or {}), MARKS: marks_with(self._mark)},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT if log else None,
                pass_fds=pass_fds,
                start_new_session=True,
            )
        self.started_at = time.time()
        self.waits_for = ""  # Only a role on another node waits.
        self._guardian.add(self.pid)

    @property
    def pid(self) -> int:
        """The process id, which is also the id of its group."""
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit code (negative: minus the signal); None while it runs."""
        return self._process.poll()

    def has_ended_by(self, deadline: float) -> bool:
        """Wait for its end; False if `deadline` (monotonic) passes first."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline - time.monotonic()))
        return self.poll() is not None

    def terminate(self) -> None:
        """Send SIGTERM to the child itself, not to its descendants."""
        if self.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill its group without waiting for the end."""
        signal_group(self.pid, signal.SIGKILL)

    def clear_away(self) -> None:
        """Kill the child, its group and all remaining descendants at once."""
        self.kill()
        for pid in find_marked(self._mark):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        # Only a process that is stuck in the kernel or a driver survives SIGKILL.
        if not self.has_ended_by(time.monotonic() + KILLED_S):
            logger.error("process survives SIGKILL name=%s pid=%d", self.name, self.pid)
            return
        if self._guardian is not None:
            self._guardian.remove(self.pid)
            self._guardian.remove_mark(self._mark)
            self._guardian = None

    def stop(self, *, timeout_s: float) -> bool:
        """Send SIGTERM to the child, wait, clear away; return whether it ended in time."""
        self.terminate()
        is_in_time = self.has_ended_by(time.monotonic() + timeout_s)
        self.clear_away()
        return is_in_time

    def wait_until(self, is_ready: Callable[[], bool], *, timeout_s: float) -> None:
        """Wait for a result of the child.

        Raises: ChildFailed: the child ended first or timed out; the message holds the end of its
        log."""
        deadline = time.monotonic() + timeout_s
        while not is_ready():
            code = self.poll()
            if code is not None and not is_ready():
                raise ChildFailed(f"{self.name} ended: {describe_exit(code)}{self._last_output()}")
            if time.monotonic() > deadline:
                text = f"{self.name}: not ready within {timeout_s:g} s"
                raise ChildFailed(f"{text}{self._last_output()}")
            time.sleep(POLL_S)

    def log_tail(self, *, max_lines: int) -> list[str]:
        """Return the last lines that this process, not an earlier one, wrote to its log."""
        if self.log_path is None:
            return []
        return read_tail(self.log_path, self._log_offset, max_lines=max_lines)

    def last_error(self) -> str:
        """Return the last error that this process wrote to its log, see `find_error`."""
        return find_error(self.log_tail(max_lines=TAIL_LINES))

    def _last_output(self) -> str:
        """Return the last lines of the log and its path, for an error."""
        lines = "".join(f"\n  {line}" for line in self.log_tail(max_lines=TAIL_LINES))
        return f"{lines}\nLog: {self.log_path}" if self.log_path else ""


def read_tail(log_path: Path, offset: int, *, max_lines: int) -> list[str]:
    """Return the last lines of a log that begin at `offset` bytes or later."""
    with log_path.open("rb") as log:
        size = log.seek(0, os.SEEK_END)
        offset = offset if offset <= size else 0  # The log was truncated.
        log.seek(max(offset, size - MAX_TAIL_BYTES))
        text = log.read().decode(errors="replace")
    return [line for line in text.splitlines() if line.strip()][-max_lines:]


def find_error(lines: Sequence[str]) -> str:
    """Return the last line that begins with "error: ", or the last line, or "no output".

    The last line alone is not enough, because libraries log more lines during the exit.
    """
    errors = [line for line in lines if line.startswith(ERROR)]
    return (errors or lines or ["no output"])[-1]


def describe_exit(code: int) -> str:
    """Return "exit code 3" or "killed by SIGKILL"."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def wait_until_ended(children: Iterable[ChildProcess], *, deadline: float) -> bool:
    """Wait for children to end by themselves; False if `deadline` (monotonic) passes first."""
    return all(child.has_ended_by(deadline) for child in children)
