"""Placement of episodes: creates them in this process or in workers, and owns the workers."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace

from common.errors import EnvError
from common.host.cgroups import num_cores
from common.host.guardian import Guardian
from common.memory import resident_bytes
from envhub.catalogue.registry import Registry
from envhub.env import EnvSpec, Isolation, Style
from envhub.hosting.env_calls import call_environment
from envhub.hosting.episodes import HostedEpisode, LocalEpisode, WorkerEpisode
from envhub.hosting.inline import INLINE_STEP_S, InlineBudget
from envhub.hosting.worker import Worker
from envhub.hosting.worker_pool import WorkerPool

logger = logging.getLogger(__name__)

MEMORY_INTERVAL_S = 5.0
MAX_MOVED_WORKERS = 8  # Worker limit of a moved environment, which has no limit of its own.


class EpisodeFactory:
    """Creates episodes by an environment's isolation. Worker pools are created at first use."""

    def __init__(
        self,
        registry: Registry,
        *,
        capacity: int,
        step_timeout_s: float,
        inline_step_s: float = INLINE_STEP_S,
        on_lost: Callable[[Worker], None] = lambda _: None,
    ) -> None:
        """`capacity` is per environment; `on_lost` is called for each lost worker."""
        self.inline = InlineBudget(inline_step_s)
        self._registry = registry
        self._capacity = capacity
        self._step_timeout_s = step_timeout_s
        self._on_lost = on_lost
        self._pools: dict[str, WorkerPool] = {}
        self._guardian: Guardian | None = None
        # Lost workers, by environment and cause.
        self.num_lost: Counter[tuple[str, str]] = Counter()

    def capacity(self, spec: EnvSpec) -> int:
        """Return the maximum number of concurrent sessions of an environment."""
        if spec.isolation is Isolation.INLINE:
            return self._capacity
        return min(self._capacity, spec.max_workers * spec.sessions_per_worker)

    def make(self, spec: EnvSpec, style: Style) -> HostedEpisode:
        """Return a new episode that is not open yet."""
        timeout_s = spec.step_timeout_s or self._step_timeout_s
        if spec.isolation is Isolation.WORKER or not self.inline.is_kept(spec.name):
            return WorkerEpisode(self._pool(spec), style, timeout_s=timeout_s)
        return LocalEpisode(spec, style, self.inline, timeout_s=timeout_s)

    def workers(self) -> list[Worker]:
        return [worker for pool in self._pools.values() for worker in pool.workers]

    def _pool(self, spec: EnvSpec) -> WorkerPool:
        """Return the worker pool of an environment, created at the first use."""
        pool = self._pools.get(spec.name)
        if pool is None:
            self._guardian = self._guardian or Guardian()
            order = self._registry.load_order(spec.name)
            if spec.isolation is Isolation.INLINE:
                num = min(MAX_MOVED_WORKERS, num_cores())
                places = -(-self._capacity // num)
                spec = replace(spec, max_workers=num, sessions_per_worker=places)
            pool = WorkerPool(spec, order, guardian=self._guardian, on_lost=self._count_loss)
            self._pools[spec.name] = pool
        return pool

    def _count_loss(self, worker: Worker) -> None:
        """Count a lost worker and report it."""
        if worker.cause != "stop":
            self.num_lost[worker.env_name, worker.cause] += 1
        self._on_lost(worker)

    async def watch_memory(self) -> None:
        """Replace workers that exceed their memory limit; only cancellation ends this loop."""
        while True:
            await asyncio.sleep(MEMORY_INTERVAL_S)
            await self.check_memory()

    async def check_memory(self) -> None:
        """Measure all workers, and replace those above their limit."""
        workers = self.workers()
        if not workers:
            return
        resident = await asyncio.to_thread(resident_bytes, [each.pid for each in workers])
        for pool in self._pools.values():
            pool.check_memory(resident)

    async def stop(self) -> None:
        """Stop the workers, and the resources that environments share in this process."""
        stops = [pool.stop() for pool in self._pools.values()]
        for spec in self._registry.loaded():
            if spec.isolation is not Isolation.WORKER and spec.stop is not None:
                stops.append(_stop_environment(spec, spec.stop))
        self.inline.stop()
        await asyncio.gather(*stops)
        if self._guardian is not None:
            self._guardian.close()
            self._guardian = None


async def _stop_environment(spec: EnvSpec, stop: Callable[[], Awaitable[None]]) -> None:
    """Release the resources that an environment shares. A failure is only logged."""
    try:
        await call_environment(spec.name, stop, timeout_s=spec.stop_timeout_s)
    except EnvError as error:
        logger.warning("environment did not stop reason=%s", error)
