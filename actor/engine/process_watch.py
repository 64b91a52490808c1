"""The engine's processes as their parent sees them: what they print, and how they end."""

import asyncio
import os
import re
import select
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess

from common.launch.process import describe_exit

TAIL_LINES = 15  # in an error
# The last line of a traceback, after the name that vLLM puts before the lines of a process.
ERROR_LINE = re.compile(r"(?:\([^)]*\) )?(?:ERROR [^\]]*\] )?([\w.]*(?:Error|Exception): \S.*)")
EXIT_S = 2.0  # until a process whose engine is dead has ended


OWNER = "LONGSTRIDE_ENGINE_OWNER"  # environment variable: the actor's process id


def own_engines() -> None:
    """Let the engines that this process starts from now on end with it."""
    os.environ[OWNER] = str(os.getpid())


def end_with_owner() -> None:
    """Kill this worker process as soon as the actor's is gone; vLLM would wait for ever.

    Who kills an actor with SIGKILL (a person, the kernel out of memory, a cluster that gives a
    node up) cannot tell its engine, which would go on holding a GPU.
    """
    owner = int(os.environ.get(OWNER, "0"))
    if owner in (0, os.getpid()):
        return
    try:
        watched = os.pidfd_open(owner)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    threading.Thread(target=_wait_for_end, args=(watched,), name="owner", daemon=True).start()


def _wait_for_end(watched: int) -> None:
    poll = select.poll()
    poll.register(watched, select.POLLIN)  # readable once the process has ended
    poll.poll()
    os.kill(os.getpid(), signal.SIGKILL)


class ProcessWatch:
    """Passes on what the engine's processes print, and keeps the last lines for an error.

    Example:
        watch = ProcessWatch()
        with watch.printing():      what is started in here prints through the watch, for ever
            llm = start()
        watch.processes = [...]
        await watch.describe_death()  -> "EngineCore killed by SIGILL; its last lines: ..."
    """

    def __init__(self) -> None:
        self.processes: list[BaseProcess] = []
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._reader: threading.Thread | None = None

    @contextmanager
    def printing(self) -> Iterator[None]:
        """Take over stdout and stderr of this process for as long as children are started."""
        sys.stdout.flush()
        sys.stderr.flush()
        saved = os.dup(1), os.dup(2)
        reader, writer = os.pipe()
        self._reader = threading.Thread(
            target=self._pass_on, args=(reader, os.dup(2)), name="engine-output", daemon=True
        )
        self._reader.start()
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        os.close(writer)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, copy in enumerate(saved, start=1):
                os.dup2(copy, number)
                os.close(copy)

    def _pass_on(self, reader: int, to: int) -> None:
        """Copy until no process has the other end any more."""
        with os.fdopen(reader, "rb") as lines, os.fdopen(to, "wb", buffering=0) as out:
            for line in lines:
                out.write(line)
                if text := line.decode(errors="replace").strip():
                    self._tail.append(text)

    def tail(self) -> str:
        """Return the last lines, "" if nothing was printed."""
        lines = "".join(f"\n  {line}" for line in self._tail)
        return f"; its last lines:{lines}" if lines else ""

    def cause(self) -> str:
        """Return "; the cause is NameError: ..." of the last error printed, "" if none was."""
        found = [match.group(1) for line in self._tail if (match := ERROR_LINE.match(line))]
        return f"; the cause is {found[-1]}" if found else ""

    async def describe_death(self) -> str:
        """Return which process ended how, and its last lines; waits a little for the end."""
        for process in self.processes:
            await asyncio.to_thread(process.join, EXIT_S)
        ends = [
            f"{process.name} {describe_exit(process.exitcode)}"
            for process in self.processes
            if process.exitcode
        ]
        return (", ".join(ends) or "no process of it has ended") + self.tail()

    def describe_failed_start(self, error: BaseException) -> str:
        """Return why the engine did not start: never empty, signals by their names."""
        if self._reader is not None:
            self._reader.join(EXIT_S)
        reason = str(error).replace("See root cause above. ", "").strip() or type(error).__name__
        named = re.sub(r"(?<=: )-\d+\b", lambda found: describe_exit(int(found.group())), reason)
        return named + self.cause() + self.tail()
