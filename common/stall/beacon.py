"""Progress reports of a role to its supervisor, and its stacks on request."""

import asyncio
import contextlib
import faulthandler
import functools
import io
import json
import os
import re
import signal
import socket
import threading
import time
import traceback
from collections.abc import Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from common.stall.stacks import STACKS, STACKS_SIGNAL, STDERR, helpers_of
from common.store.run_dir import RunDir, write_atomically

WRITE_S = 1.0
ASLEEP_S = 3 * WRITE_S  # A longer gap between two rounds of the writing thread is a suspension.
# States of the line "main" around the work.
STARTING = "starting"
LEAVING = "leaving"
MAX_TASKS = 50  # Maximum number of an event loop's tasks whose stacks are written.
MAX_FRAMES = 12  # Maximum number of frames of a task's stack.
_BEGUN = threading.Event()  # The event is set when this process's role has finished its start.


@dataclass(slots=True)
class MonitoredWork:
    """One line of work, such as a role's main thread."""

    what: str
    waits_for: str  # "learner: weights"; "" during work.
    since: float  # Monotonic seconds without suspensions.
    limit_s: float | None = None  # Limit of this piece of work; None: the general rule.
    longest_s: float = 0.0  # Longest earlier piece of work of this kind.


class Beacon:
    """Writes the current activity of each line of work once a second, from its own thread.

    A process that is stopped, or that holds the interpreter lock, writes nothing. If the main
    thread hangs, the file shows how long its activity has not changed.

    Example:
        beacon.note("training", "step 5")
        beacon.note("training", "", waits_for="actors: a batch")
    """

    def __init__(self, run_dir: RunDir, role: str) -> None:
        folder = run_dir.alive
        self._path = folder / f"{role}.json"
        self._stacks_path = folder / f"{role}.stacks"
        self._began_at = time.time()
        self._lock = threading.Lock()
        self._lines: dict[str, MonitoredWork] = {}
        self._longest: dict[str, float] = {}  # Seconds by kind of work.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stacks: TextIO | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._write_periodically, name="beacon", daemon=True)

    def start(self) -> None:
        """Enable stack requests and begin to write. Call from the main thread."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        for path in helpers_of(self._path.parent, self._path.stem):
            path.unlink(missing_ok=True)  # An earlier process of this role wrote it.
        self._stacks_path.unlink(missing_ok=True)
        self._stacks = self._stacks_path.open(
            "a", encoding="utf-8"
        )  # Truncation needs append mode.
        os.environ[STACKS] = f"{os.getpid()}:{self._path.with_suffix('')}"
        faulthandler.register(STACKS_SIGNAL, file=self._stacks, all_threads=True)
        self._thread.start()

    def stop(self) -> None:
        """Write a last report. The process may end slowly, and must not count as hanging."""
        self._stopping.set()
        self._thread.join(WRITE_S)
        self._lines = {}
        self.note("main", LEAVING)
        with contextlib.suppress(OSError):
            self._write()
        if self._stacks is not None:
            faulthandler.unregister(STACKS_SIGNAL)
            signal.signal(STACKS_SIGNAL, signal.SIG_IGN)  # Later requests are ignored.
            self._stacks.close()

    def watch_tasks(self) -> None:
        """Include the stacks of the running event loop's tasks in the answer to a request."""
        self._loop = asyncio.get_running_loop()

    def note(
        self, line: str, what: str, *, waits_for: str = "", limit_s: float | None = None
    ) -> None:
        """Record progress: a line of work begins a new activity, or the same one again."""
        if line == "main" and what not in (STARTING, LEAVING):
            _BEGUN.set()
        now = time.monotonic()
        with self._lock:
            work = self._lines.get(line)
            if work is not None and not work.waits_for:
                kind = _kind(line, work.what)
                took_s = now - work.since
                self._longest[kind] = max(self._longest.get(kind, 0.0), took_s)
            longest_s = self._longest.get(_kind(line, what), 0.0)
            self._lines[line] = MonitoredWork(what, waits_for, now, limit_s, longest_s)

    def renew(self, line: str) -> None:
        """Record progress within the present activity of a line of work."""
        with self._lock:
            work = self._lines.get(line)
        if work is not None:
            self.note(line, work.what, waits_for=work.waits_for, limit_s=work.limit_s)

    def _write_periodically(self) -> None:
        """Write a report at regular intervals until stopped."""
        written_at = time.monotonic()
        stacks_size = 0
        while not self._stopping.is_set():
            slept_s = time.monotonic() - written_at
            with self._lock:
                for line in self._lines.values():
                    line.since += slept_s if slept_s > ASLEEP_S else 0.0
            written_at = time.monotonic()
            with contextlib.suppress(OSError):  # Other code reports a full disk.
                self._write()
                size = self._stacks_path.stat().st_size
                if size != stacks_size and self._stacks is not None:
                    self._stacks.write(_tasks_of(self._loop))
                    self._stacks.flush()
                    stacks_size = self._stacks_path.stat().st_size
            self._stopping.wait(WRITE_S)

    def _write(self) -> None:
        """Write the report. Raises: OSError: the disk may be full."""
        with self._lock:
            lines = {name: asdict(line) for name, line in self._lines.items()}
        process = {"pid": os.getpid(), "boot_id": boot_id(), "began_at": self._began_at}
        content = process | {"written_at": time.monotonic(), "lines": lines}
        write_atomically(self._path, json.dumps(content))


def has_begun() -> bool:
    """Return whether this process's role has finished its start and begun to work."""
    return _BEGUN.is_set()


@contextlib.contextmanager
def beacon_of(run_dir: RunDir | None, role: str, *, start_s: float) -> Generator[Beacon]:
    """Yield the beacon of a role that is starting and has `start_s` for it.

    On a machine without the run's directory (None) no report is written, and stacks go to the
    log.
    """
    is_main = threading.current_thread() is threading.main_thread()
    has_report = run_dir is not None and is_main
    if is_main and not has_report:
        os.environ[STACKS] = f"{os.getpid()}:"
        faulthandler.register(STACKS_SIGNAL, file=STDERR, all_threads=True)
    beacon = Beacon(run_dir or RunDir(root=Path()), role)
    beacon.note("main", STARTING, limit_s=start_s)
    if has_report:
        beacon.start()
    try:
        yield beacon
    finally:
        if has_report:
            beacon.stop()
        elif is_main:
            faulthandler.unregister(STACKS_SIGNAL)
            signal.signal(STACKS_SIGNAL, signal.SIG_IGN)


@functools.cache
def boot_id() -> str:
    """Return an id of this machine's boot. Its clock and process ids are valid for one boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return socket.gethostname()


def _kind(line: str, what: str) -> str:
    """Return the text without digits, which is the same for "step 5" and "step 6"."""
    return f"{line}: {re.sub(r'[0-9]+', '', what)}"


def _tasks_of(loop: asyncio.AbstractEventLoop | None) -> str:
    """Return the stacks of an event loop's tasks as text. The loop may be running."""
    if loop is None:
        return ""
    try:
        tasks = list(asyncio.all_tasks(loop))
    except RuntimeError:  # The set of tasks changed during iteration.
        return ""
    out = io.StringIO()
    for task in tasks[:MAX_TASKS]:
        out.write(f"Task {task.get_name()}:\n")
        for frame in task.get_stack(limit=MAX_FRAMES):
            out.writelines(traceback.format_stack(frame, limit=1))
    return out.getvalue()
