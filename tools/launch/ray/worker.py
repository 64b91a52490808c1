"""The Ray actor that runs `run.py ROLE --join` on the node that Ray has chosen."""

# Ray's types are partly unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import os
import signal
import sys
import tempfile
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import psutil
import ray

from common.host.child_process import ChildProcess
from common.host.guardian import MARKS, kill_marked, marks_with
from common.memory import family_bytes
from common.repository import CODE, ROOT
from common.stall.stacks import ask

POLL_S = 0.1  # Polling interval; there is no portable event for a growing file.
LONGEST_S = 5.0  # Longest time between two reports about a silent role.
MAX_BYTES = 1 << 23  # Maximum bytes of a log in one report.
MAX_LOG_BYTES = 1 << 26  # Size of the log on this node above which it is emptied.
APART_S = 0.1  # Seconds between two stack requests.


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace:
    """The node and the GPUs that Ray has assigned to a worker."""

    node_id: str
    host: str
    gpu_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinCommand:
    """The role that a worker starts, and the run that it joins."""

    name: str
    role: str
    scheduler: str  # HOST:PORT
    join_key: str  # Content of the key file.
    overrides: tuple[str, ...]
    env: dict[str, str]  # Variables that are added to the node's own.
    program: tuple[str, str] | None  # Interpreter and run.py; None: the worker's own.


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleReport:
    """New log text and state of a role."""

    pid: int
    text: bytes
    memory_bytes: int
    exit_code: int | None = None


class JoinWorker:
    """Runs a role, which ends with this process, even if that is killed.

    The other methods may be called while `run` reports.
    """

    def __init__(self, mark: str) -> None:
        """Kill the processes of this role's earlier worker on this node; start nothing yet."""
        kill_marked(mark)
        os.environ[MARKS] = marks_with(mark)
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray sets it to the requested CPUs of the worker.
        self._child: ChildProcess | None = None

    def place(self) -> WorkerPlace:
        """Return the node and the GPUs of this worker."""
        context = ray.get_runtime_context()
        return WorkerPlace(
            node_id=context.get_node_id(),
            host=ray.util.get_node_ip_address(),
            gpu_ids=tuple(context.get_accelerator_ids().get("GPU", [])),
        )

    def run(self, command: JoinCommand) -> Generator[RoleReport]:
        """Start the role; yield its log and its state. The last report has the exit code."""
        # Unnamed files disappear with this process, even if it is killed.
        with tempfile.TemporaryFile() as key, tempfile.TemporaryFile(buffering=0) as log:
            key.write(command.join_key.encode())
            key.flush()
            key_path, log_path = (f"/proc/self/fd/{file.fileno()}" for file in (key, log))
            program = command.program or (sys.executable, str(CODE / "run.py"))
            join = ("--join", command.scheduler, "--key", key_path)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray blocks some; children inherit it.
            self._child = child = ChildProcess(
                command.name,
                (*program, command.role, *join, *command.overrides),
                log_path=Path(log_path),
                env=command.env,
                cwd=ROOT,
                pass_fds=[key.fileno()],
            )
            report_at = 0.0
            memory_bytes = 0
            code = None
            text = b""
            while code is None or text:
                code = child.poll()
                if code is not None:
                    child.clear_away()  # Nothing writes to the log after this.
                text = log.read(MAX_BYTES)
                is_due = time.monotonic() > report_at
                if is_due:
                    report_at = time.monotonic() + LONGEST_S
                    memory_bytes = family_bytes()
                if text or is_due:
                    yield RoleReport(pid=child.pid, text=text, memory_bytes=memory_bytes)
                elif code is None:
                    time.sleep(POLL_S)
                if log.tell() > MAX_LOG_BYTES and log.tell() == os.fstat(log.fileno()).st_size:
                    log.truncate(0)  # The role appends.
                    log.seek(0)
            yield RoleReport(pid=child.pid, text=b"", memory_bytes=0, exit_code=code)

    def terminate(self) -> None:
        """Send SIGTERM to the role itself."""
        if self._child is not None:
            self._child.terminate()

    def kill(self) -> None:
        """Kill the role's group. `run` kills its remaining processes and reports the end."""
        if self._child is not None:
            self._child.kill()

    def request_stacks(self) -> None:
        """Make the role and its helpers write their stacks to the role's log."""
        if self._child is not None and ask(self._child.pid):
            for helper in psutil.Process(self._child.pid).children(recursive=True):
                time.sleep(APART_S)  # Simultaneous writes would be mixed up in the log.
                ask(helper.pid)
