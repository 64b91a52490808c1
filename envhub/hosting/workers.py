"""Worker processes of one environment: started on demand, reused, killed and replaced."""

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from common.errors import EnvError, EnvTimeout
from common.launch.guardian import Guardian
from common.repository import ROOT
from envhub.env import UnknownItem
from envhub.errors import CapacityFull, EnvRaised, WorkerLost
from envhub.hosting.frames import MAX_FRAME_BYTES, encode_frame, read_frame
from envhub.hosting.process_memory import MARK, kill_group, kill_marked

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 1.0
REAP_TIMEOUT_S = 5.0
MIN_LIFE_S = 1.0  # a worker that dies sooner is not replaced before somebody needs one
HARD_LIMIT_FACTOR = 1.5  # times its memory limit, a worker is killed with sessions in it


class Worker:
    """One worker process as the hub sees it. `failure` is "" while it is usable.

    Example: two calls wait for replies; one passes its deadline. `call` kills the process group
    and raises EnvTimeout there; the other call raises WorkerLost; `on_lost` is told once.
    """

    def __init__(self, env_name: str, number: int, *, on_lost: "Callable[[Worker], None]") -> None:
        self.env_name = env_name
        self.number = number
        self.num_sessions = 0
        self.is_draining = False
        self.rss_bytes = 0
        self.failure = ""
        self.cause = ""
        self.ready_at_s: float | None = None
        self.starting: asyncio.Task[None] | None = None
        self._on_lost = on_lost
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._ids = itertools.count()
        self._mark = secrets.token_hex(8)
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """The process, which leads its own group; 0 before it is started."""
        return self._process.pid if self._process else 0

    def spawn(self) -> None:
        """Start the process, the leader of a group of its own."""
        self._ours, theirs = socket.socketpair()
        with theirs:
            paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
            level = logging.getLevelName(logger.getEffectiveLevel())
            marked = {MARK: self._mark, "PYTHONPATH": os.pathsep.join(paths)}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "envhub.hosting.worker_main", str(theirs.fileno()), level],
                stdin=subprocess.DEVNULL,
                env=os.environ | marked,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    async def load(self, load_order: dict[str, Any]) -> None:
        """Have the process load the environment.

        Raises:
            EnvRaised: it did not come up.
        """
        began_s = time.monotonic()
        reader, self._writer = await asyncio.open_connection(sock=self._ours, limit=MAX_FRAME_BYTES)
        self._reading = asyncio.create_task(self._read(reader))
        try:
            await self.call("init", timeout_s=START_TIMEOUT_S, **load_order)
        except EnvError as error:
            self.lose("start", "did not start")
            raise EnvRaised(f"{self.env_name}: worker did not start: {error}") from error
        self.ready_at_s = time.monotonic()
        logger.info("worker ready %s pid=%d took_s=%.2f", self, self.pid, self.ready_at_s - began_s)

    def __str__(self) -> str:
        return f"{self.env_name}/{self.number}"

    async def call(self, op: str, *, timeout_s: float, **fields: object) -> Any:
        """Return what the worker answers; a call past its deadline ends the worker.

        Raises:
            UnknownItem, EnvRaised: what the environment raised there.
            EnvTimeout: no answer in time.
            WorkerLost: the worker died, or was killed on account of another call.
        """
        if self.failure or self._writer is None:
            raise WorkerLost(self.failure or f"worker {self} has not started")
        number = next(self._ids)
        future = asyncio.get_running_loop().create_future()
        self._pending[number] = future
        self._writer.write(encode_frame({"id": number, "op": op, **fields}))
        try:
            async with asyncio.timeout(timeout_s):
                reply = await future
        except TimeoutError as error:
            self.lose("deadline", f"was killed: {op!r} took longer than {timeout_s:g} s")
            raise EnvTimeout(self.failure) from error
        finally:
            self._pending.pop(number, None)
        if "error" not in reply:
            return reply["result"]
        if reply["error"] == "unknown_item":
            raise UnknownItem(reply["detail"])
        raise EnvRaised(f"{self.env_name}: {reply['detail']}")

    def lose(self, cause: str, what: str) -> None:
        """Kill the process and all that it started; its calls raise. Only the first call counts.

        Args:
            cause: deadline, memory, died, start or stop.
            what: for people, such as "was killed: ...".
        """
        if self.failure:
            return
        self.cause = cause
        self.failure = f"{self.env_name}: worker {self.number} (pid {self.pid}) {what}"
        if cause != "stop":
            logger.warning("worker lost %s cause=%s sessions=%d", self, cause, self.num_sessions)
        if self.pid:
            kill_group(self.pid)
        for future in self._pending.values():
            if not future.done():
                future.set_exception(WorkerLost(self.failure))
        if self._writer is not None:
            self._writer.close()
        self._on_lost(self)

    async def reap(self) -> None:
        """Wait for the end of a lost worker and end what it left behind."""
        if self._process is not None:
            try:
                await asyncio.to_thread(self._process.wait, REAP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                logger.error("worker does not end after SIGKILL %s pid=%d", self, self.pid)
        await asyncio.to_thread(kill_marked, self._mark)
        if self._reading is not None:
            self._reading.cancel()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                reply = await read_frame(reader)
                future = self._pending.get(reply["id"])
                if future is not None and not future.done():
                    future.set_result(reply)
        except (asyncio.IncompleteReadError, ConnectionError, ValueError) as error:
            self.lose("died", f"died: {await self._ending()} ({type(error).__name__})")

    async def _ending(self) -> str:
        """Return how a process ended whose socket has closed; it may still be at it."""
        assert self._process is not None
        for _ in range(20):
            code = self._process.poll()
            if code is not None:
                return f"signal {-code}" if code < 0 else f"exit code {code}"
            await asyncio.sleep(0.01)
        return "it closed its connection"


class WorkerPool:
    """The workers of one environment. A session keeps its worker for life.

    Example: 2 workers of 1 session. The first `take` starts worker 1, the second worker 2, the
    third raises CapacityFull. Worker 1 dies: its session is told by `on_lost`, worker 3 starts.
    """

    def __init__(
        self,
        env_name: str,
        load_order: dict[str, Any],
        *,
        sessions_per_worker: int,
        max_workers: int,
        memory_bytes: int,
        guardian: Callable[[], Guardian],
        on_lost: Callable[[Worker], None],
    ) -> None:
        """`guardian` gives the process that ends the workers if the hub is killed."""
        self.env_name = env_name
        self.workers: list[Worker] = []
        self._load_order = load_order
        self._sessions_per_worker = sessions_per_worker
        self._max_workers = max_workers
        self._memory_bytes = memory_bytes
        self._on_lost = on_lost
        self._numbers = itertools.count(1)
        self._reaping: set[asyncio.Task[None]] = set()
        self._guardian = guardian
        self._is_stopping = False

    async def take(self) -> Worker:
        """Return a ready worker with one of its places taken for the caller.

        Raises:
            CapacityFull: no place is free.
            EnvRaised: a worker had to be started and did not come up.
        """
        worker = self._choose()
        worker.num_sessions += 1
        assert worker.starting is not None
        try:
            await asyncio.shield(worker.starting)
        except BaseException:
            self.give_back(worker)
            raise
        return worker

    def give_back(self, worker: Worker) -> None:
        """Free a place. A worker that is to go goes with its last session."""
        worker.num_sessions -= 1
        if worker.is_draining and worker.num_sessions == 0:
            worker.lose("memory", "was replaced: memory")

    def _choose(self) -> Worker:
        open_workers = [worker for worker in self.workers if not worker.is_draining]
        for worker in open_workers:
            if worker.num_sessions < self._sessions_per_worker:
                return worker
        if len(open_workers) < self._max_workers and not self._is_stopping:
            return self._start()
        places = self._max_workers * self._sessions_per_worker
        raise CapacityFull(f"{self.env_name} has all its {places} places taken")

    def _start(self) -> Worker:
        worker = Worker(self.env_name, next(self._numbers), on_lost=self._lose)
        guardian = self._guardian()
        worker.spawn()
        guardian.add(worker.pid)
        self.workers.append(worker)
        worker.starting = asyncio.create_task(worker.load(self._load_order))
        worker.starting.add_done_callback(_note_failure)
        return worker

    def _lose(self, worker: Worker) -> None:
        self.workers.remove(worker)
        reaping = asyncio.create_task(self._reap(worker))
        self._reaping.add(reaping)
        reaping.add_done_callback(self._reaping.discard)
        self._on_lost(worker)
        since_s = worker.ready_at_s
        has_lived = since_s is not None and time.monotonic() - since_s >= MIN_LIFE_S
        if has_lived and not self._is_stopping and len(self.workers) < self._max_workers:
            self._start()

    async def _reap(self, worker: Worker) -> None:
        await worker.reap()
        self._guardian().remove(worker.pid)

    def check_memory(self, resident: dict[int, int]) -> None:
        """Drain workers above the limit, kill those far above it or without sessions."""
        for worker in list(self.workers):
            worker.rss_bytes = resident.get(worker.pid, worker.rss_bytes)
            if worker.rss_bytes <= self._memory_bytes:
                continue
            held, limit = worker.rss_bytes >> 20, self._memory_bytes >> 20
            worker.is_draining = True
            is_far_above = worker.rss_bytes > HARD_LIMIT_FACTOR * self._memory_bytes
            if is_far_above or worker.num_sessions == 0:
                worker.lose("memory", f"was killed: it held {held} MiB, its limit is {limit} MiB")

    async def stop(self) -> None:
        """End all workers, politely for STOP_TIMEOUT_S."""
        self._is_stopping = True
        workers = list(self.workers)
        await asyncio.gather(*(_say_stop(worker) for worker in workers))
        for worker in workers:
            worker.lose("stop", "was stopped: the hub ends")
        while self._reaping:
            await asyncio.gather(*self._reaping)


async def _say_stop(worker: Worker) -> None:
    if worker.ready_at_s is not None:
        with contextlib.suppress(EnvError, UnknownItem):
            await worker.call("stop", timeout_s=STOP_TIMEOUT_S)


def _note_failure(starting: asyncio.Task[None]) -> None:
    """Log why a worker did not start, also where nobody waits for it any more."""
    if not starting.cancelled() and starting.exception() is not None:
        logger.error("worker did not start reason=%s", starting.exception())
