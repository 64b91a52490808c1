"""An actor process with another engine in place of vLLM.

Leases, heartbeats, hub sessions, trajectories and their delivery are those of a real actor. It
receives no weights, so all its tokens are of version 0.
"""

import asyncio
import signal
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, cast

import zmq.asyncio

from actor.delivery import Delivery
from actor.formats.renderer import Renderer
from actor.rollout.hubs import Hubs
from actor.rollout.pool import EpisodePool
from actor.rollout.recording import Recordings
from actor.scheduler_client import SchedulerClient
from common.config.run_config import RunConfig
from common.store.run_dir import RunDir
from common.wire.addresses import AddressBook
from common.wire.messages import Heartbeat, Hello
from common.wire.security import load_keys

if TYPE_CHECKING:  # The import takes seconds.
    from actor.engine.engine import Engine


async def play(
    cfg: RunConfig,
    run_dir: RunDir,
    *,
    name: str,
    life: str,
    engine: Any,
    renderer: Renderer,
    start_s: float,
    recordings: Recordings | None = None,
    others: Sequence[Coroutine[Any, Any, Any]] = (),
) -> None:
    """Play until SIGTERM.

    Args:
        life: incarnation of the actor, unique in the run.
        engine: samples turns with the arguments of `Engine.generate`.
        start_s: seconds in which scheduler, hub and learner must answer at the start.
        others: loops beside those of the actor.
    """
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    context = zmq.asyncio.Context()
    keys = load_keys(run_dir.keys)
    book = AddressBook(lambda: run_dir.find_address("scheduler"))
    hello = Hello(role="actor", name=name, incarnation=life, version=0)
    scheduler = SchedulerClient(book, keys, hello=hello, context=context, silence_s=start_s)
    await scheduler.connect(timeout_s=start_s)
    await scheduler.learn_addresses(timeout_s=start_s)
    hubs = Hubs(book.hubs, cfg.actor, style=cfg.envhub.style, owner=life)
    await hubs.start(timeout_s=start_s)
    delivery = Delivery(
        book,
        keys,
        window=cfg.actor.delivery_window,
        context=context,
        on_acknowledged=recordings.drop if recordings is not None else lambda _: None,
    )
    await delivery.connect(timeout_s=start_s)
    episodes = EpisodePool(
        cfg.actor,
        actor=name,
        engine=cast("Engine", engine),
        renderer=renderer,
        environments=hubs,
        delivery=delivery,
        rounds=None,
        recordings=recordings,
    )
    loops = (
        scheduler.run(episodes.revoke),
        delivery.run(),
        _take_leases(scheduler, hubs, episodes),
        _beat(cfg, name, scheduler, episodes, delivery),
        stop.wait(),
        *others,
    )
    tasks = [asyncio.create_task(loop) for loop in loops]
    done, _ = await asyncio.wait([*tasks, episodes.failed], return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    for task in tasks:
        task.cancel()
    await episodes.cancel_all()
    await asyncio.gather(*tasks, return_exceptions=True)
    scheduler.close()
    delivery.close()
    await hubs.close()
    context.destroy(linger=0)


async def _take_leases(scheduler: SchedulerClient, hubs: Hubs, episodes: EpisodePool) -> None:
    """Request leases whenever a slot is free and a hub is available."""
    while True:
        await hubs.wait_for()
        episodes.slot_freed.clear()
        if episodes.num_free_slots == 0:
            await episodes.slot_freed.wait()
            continue
        grant = await scheduler.request_leases(num_free_slots=episodes.num_free_slots, version=0)
        episodes.start(grant.leases)
        if not grant.leases:
            await asyncio.sleep(grant.retry_after_s)


async def _beat(
    cfg: RunConfig, name: str, scheduler: SchedulerClient, episodes: EpisodePool, delivery: Delivery
) -> None:
    """Send heartbeats. A late one means that something blocks the event loop of the actor."""
    while True:
        running = [*episodes.running_ids, *delivery.pending_ids]
        num_slots = episodes.num_slots
        scheduler.beat(
            Heartbeat(role="actor", name=name, version=0, running=running, num_slots=num_slots)
        )
        await asyncio.sleep(cfg.scheduler.heartbeat_s)
