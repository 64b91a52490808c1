"""The actor process: an engine, concurrent episodes, and links to scheduler, learner and hubs."""

import asyncio
import logging
import os
import signal
import socket
import time
import uuid
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Protocol

import uvloop
import zmq.asyncio

from actor.engine.engine import Engine
from actor.engine.weights import WeightLink
from actor.formats.tools import load_renderer
from actor.links.delivery import Delivery
from actor.links.scheduler_client import SchedulerClient
from actor.links.waiting import wait_with_warnings
from actor.rollout.agent_runner import MakeAgents, make_runner
from actor.rollout.hubs import Hubs
from actor.rollout.lockstep import Rounds
from actor.rollout.pool import EpisodePool
from actor.rollout.render import Renderer
from common.config.learning import Advantage
from common.config.live.keys import followed
from common.config.run_config import RunConfig
from common.cpu import family_cpu_s
from common.errors import LongstrideError
from common.join.enrol import Joined
from common.memory import resident_bytes
from common.quick_exit import end_during_start
from common.repository import code_name
from common.seeds import engine_seed
from common.stall.beacon import Beacon, beacon_of
from common.store.run_dir import RunDir
from common.wire.addresses import AddressBook
from common.wire.messages import Heartbeat, Hello
from common.wire.security import RunKeys, own_keys
from common.wire.weight_messages import WeightsJoin

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
MEMORY_S = 10.0  # Seconds between two measurements of the memory in use.
RECOUNT_S = 10.0  # Seconds of waiting for a free slot before the slots are counted again.
LIVE_SECTIONS = ("actor",)  # Sections whose live keys an actor follows.
DRAIN_S = 5.0  # Seconds at shutdown for the acknowledgements of delivered trajectories.


class ServeChat(Protocol):
    """Serves an actor's engine to users of this machine inside the returned context."""

    def __call__(
        self, cfg: RunConfig, run_dir: RunDir, name: str, engine: Engine, renderer: Renderer
    ) -> AbstractAsyncContextManager[None]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAccess:
    """The identity of an actor and its access to the run."""

    name: str  # Unique name of the actor in all messages.
    keys: RunKeys
    book: AddressBook
    # Run directory, if it is on this machine; the supervisor reads the actor's state there.
    run_dir: RunDir | None = None
    # The model's folder holds weights. If not, the engine starts with random ones.
    has_weights: bool = True
    make_agents: MakeAgents | None = None  # None: `actor.endpoint=true` is refused.
    serve_chat: ServeChat | None = None  # None: the actor has no chat endpoint.


@dataclass(frozen=True, slots=True)
class Parts:
    """The objects of a running actor, made before its first episode."""

    name: str
    engine: Engine
    renderer: Renderer
    hubs: Hubs
    scheduler: SchedulerClient
    delivery: Delivery
    weights: WeightLink
    episodes: EpisodePool


def run(
    cfg: RunConfig,
    run_dir: RunDir,
    *,
    make_agents: MakeAgents | None = None,
    serve_chat: ServeChat | None = None,
) -> None:
    """Run an actor on the run's own disk; see `play`."""
    book = AddressBook(lambda: run_dir.find_address("scheduler"))
    name = cfg.actor.name or f"actor-{socket.gethostname()}-{os.getpid()}"
    keys = own_keys(run_dir.keys, role="actor", name=name)
    access = RunAccess(
        name=name,
        keys=keys,
        book=book,
        run_dir=run_dir,
        make_agents=make_agents,
        serve_chat=serve_chat,
    )
    play(cfg, access)


def run_joined(cfg: RunConfig, joined: Joined, *, make_agents: MakeAgents | None = None) -> None:
    """Run an actor that has only the scheduler's address and a key file; see `play`."""
    book = AddressBook(lambda: joined.address)
    name, keys = joined.key.name, joined.key.as_keys()
    access = RunAccess(
        name=name, keys=keys, book=book, has_weights=not joined.model_path, make_agents=make_agents
    )
    play(cfg, access)


def play(cfg: RunConfig, access: RunAccess) -> None:
    """Play episodes until the scheduler reports the end of the run, or until SIGTERM."""
    for number in STOP_SIGNALS:
        signal.signal(number, end_during_start)
    # Twice: the engine's start, then the connections.
    start_s = 2 * cfg.actor.start_timeout_s
    with beacon_of(access.run_dir, access.name, start_s=start_s) as beacon:
        uvloop.run(_run(cfg, access, beacon))


async def _run(cfg: RunConfig, access: RunAccess, beacon: Beacon) -> None:
    """Build the actor, and play until the run is over or a stop signal arrives."""
    context = zmq.asyncio.Context()
    try:
        parts = await _build(cfg, access, context)
        stop = asyncio.Event()
        for number in STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        try:
            beacon.watch_tasks()
            async with _chat_endpoint(cfg, access, parts):
                await _work(cfg, parts, stop, beacon)
        finally:
            await _shut_down(parts)
    finally:
        context.destroy(linger=500)


def _chat_endpoint(
    cfg: RunConfig, access: RunAccess, parts: Parts
) -> AbstractAsyncContextManager[None]:
    """Return the context in which the actor serves chat, if its run directory is here."""
    if access.serve_chat is None or access.run_dir is None:
        return nullcontext()
    return access.serve_chat(cfg, access.run_dir, parts.name, parts.engine, parts.renderer)


async def _build(cfg: RunConfig, access: RunAccess, context: zmq.asyncio.Context) -> Parts:
    """Start the engine, then connect: an actor that cannot generate never joins."""
    name = access.name
    keys = access.keys
    book = access.book
    incarnation = uuid.uuid4().hex[:12]
    exclusive = asyncio.Lock()
    renderer = load_renderer(cfg.model.path, cfg.actor.format)
    renderer.check_room(cfg.actor)
    is_lockstep = cfg.train.mode == "sync"
    engine = await Engine.start(
        cfg.model,
        cfg.actor,
        end_of_turn_ids=renderer.end_of_turn_ids,
        seed=engine_seed(cfg.run.seed, name=name, incarnation=incarnation),
        meters_load=cfg.actor.adapt_concurrency and not is_lockstep,
        has_weights=access.has_weights,
        lora=cfg.learner.lora.in_engine,
        is_repeatable=True,
        records_experts=cfg.algorithm.routing_replay,
    )
    start_s = cfg.actor.start_timeout_s
    scheduler = SchedulerClient(
        book,
        keys,
        hello=_hello(name, incarnation),
        context=context,
        silence_s=4 * cfg.scheduler.dead_after_s,
    )
    await scheduler.connect(timeout_s=start_s)
    await scheduler.learn_addresses(timeout_s=start_s)
    hubs = Hubs(book.hubs, cfg.actor, style=cfg.envhub.style, owner=incarnation)
    await hubs.start(timeout_s=start_s)
    delivery = Delivery(book, keys, window=cfg.actor.delivery_window, context=context)
    await delivery.connect(timeout_s=start_s)
    weights = WeightLink(
        book,
        keys,
        engine,
        hello=WeightsJoin(
            actor=name, incarnation=incarnation, devices=await engine.device_ids(), version=-1
        ),
        exclusive=exclusive,
        context=context,
        heartbeat_s=cfg.scheduler.heartbeat_s,
    )
    await weights.connect(timeout_s=start_s)
    rounds = Rounds(engine, max_tokens=cfg.actor.max_turn_tokens, exclusive=exclusive)
    episodes = EpisodePool(
        cfg.actor,
        actor=name,
        engine=engine,
        renderer=renderer,
        environments=hubs,
        delivery=delivery,
        rounds=rounds if is_lockstep else None,
        keeps_last=cfg.algorithm.advantage is Advantage.PPO,
        agents=make_runner(access.make_agents, cfg.actor, actor=name, renderer=renderer),
    )
    return Parts(name, engine, renderer, hubs, scheduler, delivery, weights, episodes)


def _hello(name: str, incarnation: str) -> Hello:
    """Return the actor's first message to the scheduler, before its engine has weights."""
    code = code_name()
    return Hello(role="actor", name=name, incarnation=incarnation, version=-1, commit=code)


async def _work(cfg: RunConfig, parts: Parts, stop: asyncio.Event, beacon: Beacon) -> None:
    """Run the actor's loops until the run is over; the first failure ends all of them."""
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
        await parts.episodes.cancel_all()
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
    """Report the actor's state to the scheduler and the supervisor, at each heartbeat interval."""
    pid = os.getpid()
    rss_bytes = 0
    cpu_s = 0.0
    measure_at = 0.0
    last_tokens = parts.engine.num_sampled_tokens
    last_time = time.monotonic()
    last_done = None
    done_at = last_time
    while True:
        now = time.monotonic()
        waiting_for = _waiting_for(parts)
        done = (waiting_for, parts.engine.num_sampled_tokens, parts.engine.version)
        if done != last_done:
            last_done = done
            done_at = now
            limit_s = 2 * cfg.actor.turn_timeout_s  # A longer turn ends the actor.
            beacon.note("episodes", "a turn", waits_for=waiting_for, limit_s=limit_s)
        beacon.note("main", "serving")
        changed = followed(cfg, parts.scheduler.live_config, LIVE_SECTIONS)
        if changed is not cfg:
            cfg = changed
            parts.episodes.configure(cfg.actor)
        if parts.engine.meter is not None:
            parts.episodes.adapt(parts.engine.meter.drain())
        if now >= measure_at:  # The measurement reads the state of every process of the system.
            rss_bytes = resident_bytes([pid])[pid]
            cpu_s = family_cpu_s()
            measure_at = now + MEMORY_S
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
                rss_bytes=rss_bytes,  # Includes the engine's memory.
                cpu_s=cpu_s,
            )
        )
        await asyncio.sleep(cfg.scheduler.heartbeat_s)


def _waiting_for(parts: Parts) -> str:
    """Return the role and the object that this actor waits for; "" while it works."""
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
    return "envhub" if parts.episodes.running_ids else "scheduler: leases"


async def _shut_down(parts: Parts) -> None:
    """Deregister from scheduler and learner, and close all connections."""
    await parts.episodes.cancel_all()
    parts.scheduler.close()
    parts.delivery.close()
    parts.weights.close()
    await parts.hubs.close()
    parts.engine.shut_down()
