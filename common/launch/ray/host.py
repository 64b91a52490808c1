"""The Ray worker that runs one role as a child process, on whatever node Ray put it."""

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

from common.launch.guardian import MARKS, Guardian, find_marked, marks_with
from common.launch.process import ChildProcess
from common.memory import family_bytes
from common.repository import ROOT
from common.stall.stacks import ask

LOOK_S = 0.1  # what a role wrote is a file that grew, and nothing portable tells of it
LONGEST_S = 5.0  # a silent role is heard of so often
MAX_BYTES = 1 << 23  # of a log, in one answer
MAX_LOG_BYTES = 1 << 26  # that is kept here; beyond, what the launcher has read goes
APART_S = 0.1  # between two processes that are asked
PYTHON, RUN_PY, KEY_FILE = "{python}", "{run.py}", "{join.key}"  # arguments that a node fills in


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where Ray put a worker."""

    node_id: str
    host: str
    gpu_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a worker is to start."""

    name: str
    argv: tuple[str, ...]
    env: dict[str, str]  # on top of the node's own
    log_path: str = ""  # on the run's own node; "": a temporary file that the launcher asks for
    join_key: str = ""  # what the key file of a node that joins holds


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What became of a role."""

    text: bytes  # of its log; empty if the log is the launcher's own file
    exit_code: int | None
    memory_bytes: int


class RoleHost:
    """Runs a role; the role dies with this process, however that ends.

    Several methods run at once: `follow` waits for news while `terminate` is called.
    """

    def __init__(self, mark: str) -> None:
        """Kill what an earlier worker of this role left on this node; start nothing yet."""
        for pid in find_marked(mark):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        os.environ[MARKS] = marks_with(mark)
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray sets it to the CPUs that a worker asks for
        self._guardian = Guardian()
        # Without names: they go with this process, however that ends.
        self._key, self._log = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self._child: ChildProcess | None = None
        self._memory_bytes, self._weighed_at = 0, 0.0
        self._num_cut = 0  # bytes of the log

    def place(self) -> Place:
        """Return where this is."""
        context = ray.get_runtime_context()
        return Place(
            node_id=context.get_node_id(),
            host=ray.util.get_node_ip_address(),
            gpu_ids=tuple(context.get_accelerator_ids().get("GPU", [])),
        )

    def start(self, order: Order) -> int:
        """Start the role; return its process id on this node."""
        self._key.write(order.join_key.encode())
        self._key.flush()
        own = {PYTHON: sys.executable, RUN_PY: str(ROOT / "run.py"), KEY_FILE: _path(self._key)}
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray blocks some, and children inherit it
        self._child = ChildProcess(
            order.name,
            [own.get(each, each) for each in order.argv],
            log_path=Path(order.log_path or _path(self._log)),
            env=order.env,
            cwd=ROOT,
            pass_fds=[self._key.fileno()],
            guardian=self._guardian,
        )
        return self._child.pid

    def follow(self, offset: int) -> News:
        """Return what was written to the log from `offset` on; the end, when all has been told.

        Waits for news, for `LONGEST_S` at most.
        """
        assert self._child is not None
        deadline = time.monotonic() + LONGEST_S
        while True:
            code = self._child.poll()  # before reading: what is there then is all
            text = self._read(offset)
            if text or code is not None or time.monotonic() > deadline:
                return self._news(text, None if text else code)
            time.sleep(LOOK_S)

    def terminate(self) -> None:
        """Ask the role itself to end."""
        assert self._child is not None
        self._child.terminate()

    def ask_stacks(self) -> None:
        """Ask the role and its helpers for their stacks, which they write to its log."""
        assert self._child is not None
        if ask(self._child.pid):
            for helper in psutil.Process(self._child.pid).children(recursive=True):
                time.sleep(APART_S)  # what two write at once nobody could read
                ask(helper.pid)

    def clear_away(self, offset: int) -> News:
        """Kill whatever is left; return the rest of the log."""
        assert self._child is not None
        self._child.clear_away()
        news = self._news(self._read(offset), self._child.poll())
        self._guardian.close()
        return news

    def _read(self, offset: int) -> bytes:
        """Return the log from an offset on; the role appends, so what has been read may be cut."""
        log, start = self._log.fileno(), offset - self._num_cut
        if start > MAX_LOG_BYTES and start == os.fstat(log).st_size:
            os.ftruncate(log, 0)
            self._num_cut, start = offset, 0
        return os.pread(log, MAX_BYTES, start)

    def _news(self, text: bytes, code: int | None) -> News:
        if time.monotonic() - self._weighed_at > LONGEST_S:
            self._memory_bytes, self._weighed_at = family_bytes(), time.monotonic()
        return News(text=text, exit_code=code, memory_bytes=self._memory_bytes)


def _path(file: IO[bytes]) -> str:
    """Return a path by which this process and its children open a file without a name."""
    return f"/proc/self/fd/{file.fileno()}"
