"""Supervision of the engine's processes by their parent: output, exit, and orphan protection."""

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

from common.host.child_process import describe_exit

TAIL_LINES = 15  # Lines of output in an error.
# Matches the last line of a traceback, after the process name that vLLM prepends.
ERROR_LINE = re.compile(r"(?:\([^)]*\) )?(?:ERROR [^\]]*\] )?([\w.]*(?:Error|Exception): \S.*)")
# Messages of vLLM that name a missing kernel, operator or package for GPUs.
NO_KERNEL = re.compile(
    r"supported on CPU|supported only for CUDA|_OpNamespace|No module named|'triton' has no"
    r"|no valid sparse MLA backend|failed to be inspected|CPU \w+ attention requires"
)
EXIT_S = 2.0  # Seconds for a process of a dead engine to exit.


OWNER = "LONGSTRIDE_ENGINE_OWNER"  # Environment variable with the actor's process id.


def own_engines() -> None:
    """Make all engines that this process starts from now on end with it."""
    os.environ[OWNER] = str(os.getpid())


def end_with_owner() -> None:
    """Kill this worker process when the actor process ends; vLLM would wait forever.

    An actor killed by SIGKILL (by a user, the kernel out of memory, or a cluster) cannot stop its
    engine, which would keep its GPU.
    """
    owner = int(os.environ.get(OWNER, "0"))
    if owner in (0, os.getpid()):
        return
    try:
        watched = os.pidfd_open(owner)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    threading.Thread(target=_end_with_process, args=(watched,), name="owner", daemon=True).start()


def _end_with_process(watched: int) -> None:
    """Kill this process once the watched process has ended."""
    poll = select.poll()
    poll.register(watched, select.POLLIN)  # Readable once the process has ended.
    poll.poll()
    os.kill(os.getpid(), signal.SIGKILL)


def kernel_hint(reason: str) -> str:
    """Return a sentence if vLLM's reason is a kernel that this machine lacks; "" for another."""
    if not NO_KERNEL.search(reason):
        return ""
    return "vLLM has no kernel for this model and dtype on this device; the checkpoint is valid. "


class ProcessWatch:
    """Forwards the output of the engine's processes, and keeps the last lines for errors.

    Example:
        watch = ProcessWatch()
        with watch.printing():      processes started in here print through the watch until they end
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
        """Redirect stdout and stderr of this process while children are started."""
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
        """Copy lines until all processes have closed the other end."""
        with os.fdopen(reader, "rb") as lines, os.fdopen(to, "wb", buffering=0) as out:
            for line in lines:
                out.write(line)
                if text := line.decode(errors="replace").strip():
                    self._tail.append(text)

    def tail(self) -> str:
        """Return the last lines as a suffix of an error; "" without output."""
        lines = "".join(f"\n  {line}" for line in self._tail)
        return f"; its last lines:{lines}" if lines else ""

    def cause(self) -> str:
        """Return "; the cause is NameError: ..." for the last printed error, "" if none was."""
        causes = [match.group(1) for line in self._tail if (match := ERROR_LINE.match(line))]
        return f"; the cause is {causes[-1]}" if causes else ""

    async def describe_death(self) -> str:
        """Return how each process ended, and the last lines. Waits up to `EXIT_S` for each."""
        for process in self.processes:
            await asyncio.to_thread(process.join, EXIT_S)
        ends = [
            f"{process.name} {describe_exit(process.exitcode)}"
            for process in self.processes
            if process.exitcode
        ]
        return (", ".join(ends) or "none of its processes has exited") + self.tail()

    def describe_failed_start(self, error: BaseException) -> str:
        """Return why the engine did not start: never empty, with names for signals."""
        if self._reader is not None:
            self._reader.join(EXIT_S)
        reason = str(error).replace("See root cause above. ", "").strip() or type(error).__name__
        named = re.sub(r"(?<=: )-\d+\b", lambda found: describe_exit(int(found.group())), reason)
        why = named + self.cause()
        return kernel_hint(why) + why + self.tail()
