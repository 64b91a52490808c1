"""The Ray worker that runs one role as a child process on the node that Ray has chosen."""

# Ray's types are partly unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil
import ray

from common.host.child_process import ChildProcess
from common.host.guardian import MARKS, Guardian, find_marked, marks_with
from common.memory import family_bytes
from common.repository import CODE, ROOT
from common.stall.stacks import ask

POLL_S = 0.1  # Polling interval; there is no portable event for a growing file.
LONGEST_S = 5.0  # Longest time between two answers about a silent role.
MAX_BYTES = 1 << 23  # Maximum bytes of a log in one answer.
MAX_LOG_BYTES = 1 << 26  # Size of the log on this node above which read parts are deleted.
APART_S = 0.1  # Seconds between two stack requests.
# Arguments that a node fills in.
PYTHON = "{python}"
RUN_PY = "{run.py}"
KEY_FILE = "{join.key}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAssignment:
    """The node and the GPUs that Ray has assigned to a worker."""

    node_id: str
    host: str
    gpu_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCommand:
    """The command that a worker starts."""

    name: str
    argv: tuple[str, ...]
    env: dict[str, str]  # Variables that are added to the node's own.
    log_path: str = ""  # Log file on the run's own node; "": a temporary file for the launcher.
    join_key: str = ""  # Content of a joining node's key file.


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleUpdate:
    """New log text and state of a role."""

    text: bytes  # Part of its log; empty if the launcher reads the log file itself.
    exit_code: int | None
    memory_bytes: int


class RoleHost:
    """Runs a role, which ends with this process, even if that is killed.

    Several methods run concurrently: `terminate` may be called while `follow` waits for update.
    """

    def __init__(self, mark: str) -> None:
        """Kill the processes of this role's earlier worker on this node; start nothing yet."""
        for pid in find_marked(mark):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        os.environ[MARKS] = marks_with(mark)
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray sets it to the requested CPUs of the worker.
        self._guardian = Guardian()
        # Unnamed files disappear with this process, even if it is killed.
        self._key, self._log = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self._child: ChildProcess | None = None
        self._memory_bytes = 0
        self._weighed_at = 0.0
        self._num_cut = 0  # Bytes of the log that were deleted.

    def place(self) -> WorkerAssignment:
        """Return the node and the GPUs of this worker."""
        context = ray.get_runtime_context()
        return WorkerAssignment(
            node_id=context.get_node_id(),
            host=ray.util.get_node_ip_address(),
            gpu_ids=tuple(context.get_accelerator_ids().get("GPU", [])),
        )

    def start(self, order: WorkerCommand) -> int:
        """Start the role; return its process id on this node."""
        self._key.write(order.join_key.encode())
        self._key.flush()
        replacements = {
            PYTHON: sys.executable,
            RUN_PY: str(CODE / "run.py"),
            KEY_FILE: _descriptor_path(self._key),
        }
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray blocks some; children inherit it.
        self._child = ChildProcess(
            order.name,
            [replacements.get(each, each) for each in order.argv],
            log_path=Path(order.log_path or _descriptor_path(self._log)),
            env=order.env,
            cwd=ROOT,
            pass_fds=[self._key.fileno()],
            guardian=self._guardian,
        )
        return self._child.pid

    def follow(self, offset: int) -> RoleUpdate:
        """Return the log text from `offset` on, and the exit code once all text has been returned.

        It waits for update for at most `LONGEST_S`.
        """
        assert self._child is not None
        deadline = time.monotonic() + LONGEST_S
        while True:
            code = self._child.poll()  # An exit before the read makes the text complete.
            text = self._read(offset)
            if text or code is not None or time.monotonic() > deadline:
                return self._update(text, None if text else code)
            time.sleep(POLL_S)

    def terminate(self) -> None:
        """Send SIGTERM to the role itself."""
        assert self._child is not None
        self._child.terminate()

    def request_stacks(self) -> None:
        """Make the role and its helpers write their stacks to the role's log."""
        assert self._child is not None
        if ask(self._child.pid):
            for helper in psutil.Process(self._child.pid).children(recursive=True):
                time.sleep(APART_S)  # Simultaneous writes would be mixed up in the log.
                ask(helper.pid)

    def clear_away(self, offset: int) -> RoleUpdate:
        """Kill the remaining processes of the role; return the rest of the log."""
        assert self._child is not None
        self._child.clear_away()
        update = self._update(self._read(offset), self._child.poll())
        self._guardian.close()
        return update

    def _read(self, offset: int) -> bytes:
        """Return the log from an offset on. Text that was read may be deleted; the role appends."""
        log = self._log.fileno()
        start = offset - self._num_cut
        if start > MAX_LOG_BYTES and start == os.fstat(log).st_size:
            os.ftruncate(log, 0)
            self._num_cut = offset
            start = 0
        return os.pread(log, MAX_BYTES, start)

    def _update(self, text: bytes, code: int | None) -> RoleUpdate:
        """Return the new text and state, and measure the memory if the last value is old."""
        if time.monotonic() - self._weighed_at > LONGEST_S:
            self._memory_bytes = family_bytes()
            self._weighed_at = time.monotonic()
        return RoleUpdate(text=text, exit_code=code, memory_bytes=self._memory_bytes)


def _descriptor_path(file: IO[bytes]) -> str:
    """Return a path with which this process and its children can open an unnamed file."""
    return f"/proc/self/fd/{file.fileno()}"
