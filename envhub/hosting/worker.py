"""The hub's side of one worker process: start, calls over a socket, loss and cleanup."""

import asyncio
import itertools
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from common.errors import EnvError, EnvTimeout
from common.host.child_process import ChildProcess
from common.host.guardian import Guardian
from common.repository import CODE
from envhub.env import UnknownItem
from envhub.errors import EnvRaised, ServicePaused, WorkerLost
from envhub.hosting.worker_main import MAX_FRAME_BYTES, encode_frame, read_frame

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
ENDING_TIMEOUT_S = 0.2  # Seconds to wait for a worker's exit after its connection has closed.
RAISED: dict[str, type[Exception]] = {"unknown_item": UnknownItem, "paused": ServicePaused}
LATE_S = 1.0  # A deadline noticed later than this means that the hub was suspended, not the worker.


class Worker:
    """A worker process, in order: starting, ready, perhaps draining, lost.

    Example: two calls wait for replies and one passes its deadline. `call` kills the process group
    and raises EnvTimeout; the other call raises WorkerLost; `on_lost` is called once.
    """

    def __init__(
        self, env_name: str, number: int, *, guardian: Guardian, on_lost: "Callable[[Worker], None]"
    ) -> None:
        """Start the process; the guardian ends it if the hub is killed."""
        self.env_name = env_name
        self.number = number
        self.num_sessions = 0  # Reserved places of the worker.
        # A draining worker accepts no more sessions and stops after its last one.
        self.is_draining = False
        self.rss_bytes = 0  # Resident memory at the last measurement, with child processes.
        # Time at which the environment was loaded (monotonic).
        self.ready_at_s: float | None = None
        self.failure = ""  # Reason of the loss as a text; "" while the worker is usable.
        self.cause = ""  # Reason of the loss in one word: deadline, memory, died, start or stop.
        self._on_lost = on_lost
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._ids = itertools.count()
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._socket, theirs = socket.socketpair()
        with theirs:
            level = logging.getLevelName(logger.getEffectiveLevel())
            argv = [sys.executable, "-m", "envhub.hosting.worker_main"]
            paths = [str(CODE), *filter(None, [os.environ.get("PYTHONPATH")])]
            self._process = ChildProcess(
                str(self),
                [*argv, str(theirs.fileno()), level, env_name],
                env={"PYTHONPATH": os.pathsep.join(paths)},
                pass_fds=(theirs.fileno(),),
                guardian=guardian,
            )

    @property
    def pid(self) -> int:
        """Process id of the worker, which leads its own process group."""
        return self._process.pid

    def __str__(self) -> str:
        return f"{self.env_name}/{self.number}"

    async def load(self, load_order: dict[str, Any]) -> None:
        """Load the environment in the process. Raises: EnvRaised: it did not start."""
        began_s = time.monotonic()
        reader, self._writer = await asyncio.open_connection(
            sock=self._socket, limit=MAX_FRAME_BYTES
        )
        self._reading = asyncio.create_task(self._read(reader))
        try:
            await self.call("init", timeout_s=START_TIMEOUT_S, **load_order)
        except EnvError as error:
            self.lose("start", "did not start")
            raise EnvRaised(f"{self.env_name}: worker did not start: {error}") from error
        self.ready_at_s = time.monotonic()
        logger.info("worker ready %s pid=%d took_s=%.2f", self, self.pid, self.ready_at_s - began_s)

    async def call(self, op: str, *, timeout_s: float, **fields: object) -> Any:
        """Return the worker's answer; a call past its deadline ends the worker.

        Raises:
            UnknownItem, ServicePaused, EnvRaised: raised by the environment in the worker.
            EnvTimeout: no answer in time.
            WorkerLost: the worker died, or was killed because of another call.
        """
        if self.failure or self._writer is None:
            raise WorkerLost(self.failure or f"worker {self} has not started")
        number = next(self._ids)
        future = asyncio.get_running_loop().create_future()
        self._pending[number] = future
        self._writer.write(encode_frame({"id": number, "op": op, **fields}))
        try:
            while not future.done():
                asked_s = time.monotonic()
                await asyncio.wait([future], timeout=timeout_s)
                # The reply may have arrived during a suspension of the hub.
                is_late = time.monotonic() - asked_s > timeout_s + LATE_S
                if not future.done() and not is_late:
                    future.cancel()
                    self.lose("deadline", f"was killed: {op!r} took longer than {timeout_s:g} s")
                    raise EnvTimeout(self.failure)
            reply = await future
        finally:
            self._pending.pop(number, None)
        if "error" not in reply:
            return reply["result"]
        raise RAISED.get(reply["error"], EnvRaised)(reply["detail"])

    def lose(self, cause: str, what: str) -> None:
        """Kill the process and its children; pending calls raise. Later calls have no effect.

        `cause` is the attribute of that name; `what` is a text such as "was killed: ...".
        """
        if self.failure:
            return
        self.cause = cause
        self.failure = f"{self.env_name}: worker {self.number} (pid {self.pid}) {what}"
        if cause != "stop":
            logger.warning("worker lost %s cause=%s sessions=%d", self, cause, self.num_sessions)
        self._process.kill()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(WorkerLost(self.failure))
        if self._writer is not None:
            self._writer.close()
        self._on_lost(self)

    async def reap(self) -> None:
        """Wait for the end of a lost worker and kill its remaining child processes."""
        await asyncio.to_thread(self._process.clear_away)
        if self._reading is not None:
            self._reading.cancel()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Pass each reply to the call that waits for it, until the socket closes."""
        try:
            while True:
                reply = await read_frame(reader)
                future = self._pending.get(reply["id"])
                if future is not None and not future.done():
                    future.set_result(reply)
        except (asyncio.IncompleteReadError, ConnectionError, ValueError) as error:
            self.lose("died", f"died: {await self._ending()} ({type(error).__name__})")

    async def _ending(self) -> str:
        """Return how a process with a closed socket ended; it may still be exiting."""
        deadline_s = time.monotonic() + ENDING_TIMEOUT_S
        await asyncio.to_thread(self._process.has_ended_by, deadline_s)
        code = self._process.poll()
        if code is None:
            return "it closed its connection"
        return f"signal {-code}" if code < 0 else f"exit code {code}"
