"""The workers of one environment: started on demand, reused, and replaced when lost."""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable
from typing import Any

from common.errors import EnvError
from common.host.guardian import Guardian
from envhub.env import EnvSpec, UnknownItem
from envhub.errors import CapacityFull
from envhub.hosting.worker import Worker

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 1.0
# Minimum lifetime for an immediate replacement; otherwise a new worker starts on demand.
MIN_LIFE_S = 1.0
# Multiple of the memory limit at which a worker is killed even with live sessions.
HARD_LIMIT_FACTOR = 1.5


class WorkerPool:
    """The workers of one environment. A session never changes its worker.

    Example: 2 workers of 1 session. The first `take` starts worker 1, the second worker 2, the
    third raises CapacityFull. If worker 1 dies, `on_lost` ends its session and worker 3 starts.
    """

    def __init__(
        self,
        spec: EnvSpec,
        load_order: dict[str, Any],
        *,
        guardian: Guardian,
        on_lost: Callable[[Worker], None],
    ) -> None:
        """`guardian` ends the workers if the hub is killed."""
        self.workers: list[Worker] = []
        self._spec = spec
        self._load_order = load_order
        self._guardian = guardian
        self._on_lost = on_lost
        self._numbers = itertools.count(1)
        self._starting: dict[Worker, asyncio.Task[None]] = {}
        self._reaping: set[asyncio.Task[None]] = set()
        self._is_stopping = False

    async def take(self) -> Worker:
        """Return a ready worker with one place reserved for the caller.

        Raises:
            CapacityFull: no place is free.
            EnvRaised: a new worker was required and did not start.
        """
        worker = self._choose()
        worker.num_sessions += 1
        with contextlib.ExitStack() as undo:
            undo.callback(self.give_back, worker)
            if worker in self._starting:
                await asyncio.shield(self._starting[worker])
            undo.pop_all()
        return worker

    def give_back(self, worker: Worker) -> None:
        """Free a place. A draining worker ends with its last session."""
        worker.num_sessions -= 1
        if worker.is_draining and worker.num_sessions == 0:
            worker.lose("memory", "was replaced because of its memory")

    def check_memory(self, resident: dict[int, int]) -> None:
        """Drain workers above the limit; kill those far above it and those without sessions.

        `resident` maps process ids to bytes.
        """
        limit_bytes = self._spec.worker_memory_bytes
        for worker in list(self.workers):
            worker.rss_bytes = resident.get(worker.pid, worker.rss_bytes)
            if worker.rss_bytes <= limit_bytes:
                continue
            resident_mib = worker.rss_bytes >> 20
            limit = limit_bytes >> 20
            worker.is_draining = True
            is_far_above = worker.rss_bytes > HARD_LIMIT_FACTOR * limit_bytes
            if is_far_above or worker.num_sessions == 0:
                worker.lose(
                    "memory", f"was killed: it held {resident_mib} MiB, its limit is {limit} MiB"
                )

    async def stop(self) -> None:
        """End all workers; each has STOP_TIMEOUT_S to stop by itself before it is killed."""
        self._is_stopping = True
        workers = list(self.workers)
        await asyncio.gather(*(_request_stop(worker) for worker in workers))
        for worker in workers:
            worker.lose("stop", "was stopped with the hub")
        while self._reaping:
            await asyncio.gather(*self._reaping)

    def _choose(self) -> Worker:
        """Return a worker with a free place; start one if all are full. Raises: CapacityFull."""
        open_workers = [worker for worker in self.workers if not worker.is_draining]
        for worker in open_workers:
            if worker.num_sessions < self._spec.sessions_per_worker:
                return worker
        if len(open_workers) < self._spec.max_workers and not self._is_stopping:
            return self._start()
        places = self._spec.max_workers * self._spec.sessions_per_worker
        text = f"all sessions of its workers are in use, at most {places}"
        raise CapacityFull(f"{self._spec.name}: {text}")

    def _start(self) -> Worker:
        """Start a worker, and begin to load the environment in it."""
        worker = Worker(
            self._spec.name, next(self._numbers), guardian=self._guardian, on_lost=self._replace
        )
        self.workers.append(worker)
        starting = self._starting[worker] = asyncio.create_task(worker.load(self._load_order))
        starting.add_done_callback(lambda _: self._note_start(worker))
        return worker

    def _note_start(self, worker: Worker) -> None:
        """Log why a worker did not start, even if no caller awaits the start."""
        starting = self._starting.pop(worker)
        if not starting.cancelled() and starting.exception() is not None:
            logger.error("worker did not start reason=%s", starting.exception())

    def _replace(self, worker: Worker) -> None:
        """Start a new worker in place of a lost one."""
        self.workers.remove(worker)
        reaping = asyncio.create_task(worker.reap())
        self._reaping.add(reaping)
        reaping.add_done_callback(self._reaping.discard)
        self._on_lost(worker)
        since_s = worker.ready_at_s
        has_lived = since_s is not None and time.monotonic() - since_s >= MIN_LIFE_S
        if has_lived and not self._is_stopping and len(self.workers) < self._spec.max_workers:
            self._start()


async def _request_stop(worker: Worker) -> None:
    """Ask a worker to close its episodes and shared resources."""
    if worker.ready_at_s is not None:
        with contextlib.suppress(EnvError, UnknownItem):
            await worker.call("stop", timeout_s=STOP_TIMEOUT_S)
