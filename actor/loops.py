"""The loops of one engine of an actor process: leases, heartbeats, weights and delivery."""

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from actor.delivery import Delivery, wait_with_warnings
from actor.formats.renderer import Renderer
from actor.rollout.hubs import Hubs
from actor.rollout.pool import EpisodePool
from actor.rollout.recording import why_not_of
from actor.scheduler_client import SchedulerClient
from common.config.live import followed
from common.config.run_config import RunConfig, bound_of_parts
from common.cpu import family_cpu_s
from common.errors import LongstrideError
from common.memory import resident_bytes
from common.stall.beacon import Beacon
from common.wire.messages import Heartbeat

if TYPE_CHECKING:  # The import takes seconds.
    from actor.engine.engine import Engine
    from actor.weights.receive import WeightLink

logger = logging.getLogger(__name__)

MEMORY_S = 10.0  # Seconds between two measurements of the memory in use.
RECOUNT_S = 10.0  # Seconds of waiting for a free slot before the slots are counted again.
LIVE_SECTIONS = ("actor", "learner")  # Sections whose live keys an actor follows.
DRAIN_S = 5.0  # Seconds at shutdown for the acknowledgements of delivered trajectories.


class ProcessUsage:
    """The memory and CPU time of this process and its engines, in equal shares for each engine."""

    def __init__(self, *, num_engines: int) -> None:
        self._num_engines = num_engines
        self._measure_at = 0.0
        self.rss_bytes = 0
        self.cpu_s = 0.0

    def measure_if_due(self, now: float) -> None:
        """Measure every `MEMORY_S`: a measurement reads the state of all own processes."""
        if now < self._measure_at:
            return
        pid = os.getpid()
        self.rss_bytes = resident_bytes([pid])[pid] // self._num_engines
        self.cpu_s = family_cpu_s() / self._num_engines
        self._measure_at = now + MEMORY_S


@dataclass(frozen=True, slots=True)
class Parts:
    """The objects of a running engine, made before its first episode."""

    name: str  # Name of the engine in all messages.
    engine: "Engine"
    renderer: Renderer
    hubs: Hubs
    scheduler: SchedulerClient
    delivery: Delivery
    weights: "WeightLink"
    episodes: EpisodePool
    usage: ProcessUsage


async def work_together(
    cfg: RunConfig, engines: Sequence[Parts], stop: asyncio.Event, beacon: Beacon
) -> None:
    """Run the loops of all engines until the run is over; the first failure ends all of them."""
    tasks = [
        asyncio.create_task(work(cfg, parts, stop, beacon), name=parts.name) for parts in engines
    ]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def work(cfg: RunConfig, parts: Parts, stop: asyncio.Event, beacon: Beacon) -> None:
    """Run the loops of one engine until the run is over; the first failure ends all of them."""
    loops = [
        asyncio.create_task(coroutine, name=name)
        for name, coroutine in {
            "scheduler": parts.scheduler.run(parts.episodes.revoke),
            "delivery": parts.delivery.run(),
            "weights": parts.weights.run(),
            "heartbeat": _send_heartbeats(cfg, parts, beacon),
            "leases": _take_leases(cfg, parts),
        }.items()
    ]
    ends = [asyncio.create_task(event.wait()) for event in (stop, parts.scheduler.is_finished)]
    try:
        done, _ = await asyncio.wait(
            [*loops, *ends, parts.episodes.failed], return_when=asyncio.FIRST_COMPLETED
        )
        for task in done:
            task.result()
        if not any(task in done for task in ends):
            raise LongstrideError("a background task of the actor ended without an error")
        await parts.episodes.cancel_all(is_run_over=parts.scheduler.is_finished.is_set())
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                await parts.delivery.drained()
    finally:
        for task in [*loops, *ends]:
            task.cancel()
        await asyncio.gather(*loops, *ends, return_exceptions=True)


async def _take_leases(cfg: RunConfig, parts: Parts) -> None:
    """Request leases whenever there is room: for single slots, or for whole batches in lockstep."""
    await wait_with_warnings(parts.weights.version_loaded, waiting_for="learner: first weights")
    is_lockstep = cfg.train.mode == "sync"
    has_leases = False
    while True:
        await parts.hubs.wait_for()  # The supervisor or the stall timeout ends an endless wait.
        parts.episodes.slot_freed.clear()
        num_free = parts.episodes.num_free_slots
        if num_free == 0 or (is_lockstep and parts.episodes.running_ids):
            with suppress(TimeoutError):
                async with asyncio.timeout(RECOUNT_S):
                    await parts.episodes.slot_freed.wait()
            continue
        grant = await parts.scheduler.request_leases(
            num_free_slots=num_free, version=parts.engine.version, absent=parts.hubs.absent()
        )
        parts.episodes.start(grant.leases)
        if grant.leases and not has_leases:
            has_leases = True
            logger.info(
                "received first leases num=%d version=%d", len(grant.leases), parts.engine.version
            )
        if not grant.leases:
            await asyncio.sleep(grant.retry_after_s)
        elif len(grant.leases) < num_free:
            await asyncio.sleep(0.02)  # Lets several freed slots share one request.


async def _send_heartbeats(cfg: RunConfig, parts: Parts, beacon: Beacon) -> None:
    """Report the engine's state to the scheduler and the supervisor, at each heartbeat interval."""
    last_tokens = parts.engine.num_sampled_tokens
    last_time = time.monotonic()
    last_done = None
    done_at = last_time
    while True:
        now = time.monotonic()
        waiting_for = _waiting_for(parts)
        done = (
            waiting_for,
            parts.engine.num_sampled_tokens,
            parts.engine.version,
            parts.episodes.num_ended,
        )
        if done != last_done:
            last_done = done
            done_at = now
            limit_s = 2 * cfg.actor.turn_timeout_s  # A longer turn ends the actor.
            line = _line_of(cfg, parts)
            beacon.note(line, "a turn", waits_for=waiting_for, limit_s=limit_s)
        beacon.note("main", "serving")
        changed = followed(cfg, parts.scheduler.live_config, LIVE_SECTIONS)
        if changed is not cfg:
            cfg = changed
            parts.episodes.configure(
                cfg.actor,
                max_lag_steps=bound_of_parts(cfg),
                why_not=why_not_of(cfg, lambda: parts.engine.version),
            )
        if parts.engine.meter is not None:
            parts.episodes.adapt(parts.engine.meter.drain())
        parts.usage.measure_if_due(now)
        tokens = parts.engine.num_sampled_tokens
        took_s = max(now - last_time, 1e-6)
        rate = (tokens - last_tokens) / took_s
        last_tokens = tokens
        last_time = now
        parts.scheduler.beat(
            Heartbeat(
                role="actor",
                name=parts.name,
                version=parts.engine.version,
                running=[*parts.episodes.running_ids, *parts.delivery.pending_ids],
                num_slots=parts.episodes.num_slots,
                tokens_per_s=rate,
                waiting_for=waiting_for,
                unchanged_s=now - done_at,
                rss_bytes=parts.usage.rss_bytes,  # Includes the engine's memory.
                cpu_s=parts.usage.cpu_s,
            )
        )
        await asyncio.sleep(cfg.scheduler.heartbeat_s)


def _line_of(cfg: RunConfig, parts: Parts) -> str:
    """Return the name of this engine's work in the reports to the supervisor."""
    return "episodes" if cfg.actor.engines_per_process == 1 else f"episodes of {parts.name}"


def _waiting_for(parts: Parts) -> str:
    """Return the role and the object that this engine waits for; "" while it works."""
    if not parts.weights.version_loaded.is_set():
        return "learner: first weights"
    if parts.engine.is_asleep:
        return "learner: the step's weights"
    if parts.weights.is_loading:
        return "learner: weights"
    if parts.engine.num_running:
        return ""
    if waiting_for := parts.hubs.waiting_for or parts.delivery.waiting_for:
        return waiting_for
    return parts.episodes.waiting_for


async def shut_down(engines: Sequence[Parts]) -> None:
    """Deregister all engines from scheduler and learner, and close all connections."""
    for parts in engines:
        await parts.episodes.cancel_all()
        parts.scheduler.close()
        parts.delivery.close()
        parts.weights.close()
    await engines[0].hubs.close()
    for parts in engines:
        parts.engine.shut_down()
