"""The actor process: its engines, concurrent episodes, and links to scheduler, learner and hubs."""

import asyncio
import logging
import os
import signal
import socket
import uuid
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import uvloop
import zmq.asyncio

from actor.agents.agents import agents_of
from actor.api.chat import serve_engine
from actor.delivery import Delivery
from actor.engine.engine import Engine
from actor.formats.renderer import Renderer
from actor.formats.tools import load_renderer
from actor.loops import Parts, ProcessUsage, shut_down, work_together
from actor.rollout.hubs import Hubs
from actor.rollout.lockstep import Rounds
from actor.rollout.pool import EpisodePool
from actor.rollout.recording import Recordings, records_here, why_not_of
from actor.scheduler_client import SchedulerClient
from actor.seeds import engine_seed
from actor.weights.receive import WeightLink
from common.config.actor import ActorSection
from common.config.algorithm import Advantage
from common.config.run_config import RunConfig, bound_of_parts
from common.host.machine import gpus
from common.ids import engine_names
from common.join.enrol import Joined
from common.quick_exit import end_during_start
from common.repository import code_name
from common.stall.beacon import Beacon, beacon_of
from common.store.run_dir import RunDir
from common.weights.messages import WeightsJoin
from common.wire.addresses import AddressBook
from common.wire.messages import Hello
from common.wire.security import RunKeys, own_keys

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

VISIBLE = "CUDA_VISIBLE_DEVICES"


@contextmanager
def visible_gpus(number: int, cfg: ActorSection) -> Iterator[None]:
    """Show the GPUs of one engine to the processes that are started in the context.

    A process with one engine shows all of its own GPUs.

    Example (4 GPUs, two engines of two workers): engine 0 gets the first two, engine 1 the rest.
    """
    shown = [gpu.uuid for gpu in gpus()] if cfg.engines_per_process > 1 else []
    before = os.environ.get(VISIBLE)
    if shown:
        os.environ[VISIBLE] = ",".join(gpus_of(number, shown, width=cfg.tensor_parallel_size))
    try:
        yield
    finally:
        if shown and before is None:
            del os.environ[VISIBLE]
        elif shown and before is not None:
            os.environ[VISIBLE] = before


def gpus_of(number: int, shown: list[str], *, width: int) -> list[str]:
    """Return the GPUs of one engine: the next `width` ones, from the beginning after the last.

    Example (2 GPUs, three engines of one worker): engine 2 shares the first GPU with engine 0.
    """
    first = number * width
    return list(dict.fromkeys(shown[i % len(shown)] for i in range(first, first + width)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAccess:
    """The identity of an actor and its access to the run."""

    name: str  # Unique name of the actor in all messages.
    keys: RunKeys
    book: AddressBook
    # Run directory, if it is on this machine; the supervisor reads the actor's state there.
    run_dir: RunDir | None = None
    # Folder for the records of its episodes; None: they stay in memory.
    records: Path | None = None
    # The model's folder holds weights. If not, the engine starts with random ones.
    has_weights: bool = True


def run(cfg: RunConfig, run_dir: RunDir) -> None:
    """Run an actor on the run's own disk; see `play`."""
    book = AddressBook(lambda: run_dir.find_address("scheduler"))
    name = cfg.actor.name or f"actor-{socket.gethostname()}-{os.getpid()}"
    keys = own_keys(run_dir.keys, role="actor", name=name)
    access = RunAccess(name=name, keys=keys, book=book, run_dir=run_dir, records=run_dir.episodes)
    play(cfg, access)


def run_joined(cfg: RunConfig, joined: Joined) -> None:
    """Run an actor that has only the scheduler's address and a key file; see `play`."""
    book = AddressBook(lambda: joined.address)
    access = RunAccess(
        name=joined.key.name,
        keys=joined.key.as_keys(),
        book=book,
        records=records_here(joined.key.server_public),
        has_weights=not joined.model_path,
    )
    play(cfg, access)


def play(cfg: RunConfig, access: RunAccess) -> None:
    """Play episodes until the scheduler reports the end of the run, or until SIGTERM."""
    for number in STOP_SIGNALS:
        signal.signal(number, end_during_start)
    # The starts of the engines, then the connections.
    start_s = (cfg.actor.engines_per_process + 1) * cfg.actor.start_timeout_s
    with beacon_of(access.run_dir, access.name, start_s=start_s) as beacon:
        uvloop.run(_run(cfg, access, beacon))


async def _run(cfg: RunConfig, access: RunAccess, beacon: Beacon) -> None:
    """Build the engines, and play until the run is over or a stop signal arrives."""
    context = zmq.asyncio.Context()
    try:
        engines = await _build(cfg, access, context)
        stop = asyncio.Event()
        for number in STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        try:
            beacon.watch_tasks()
            async with AsyncExitStack() as stack:
                for parts in engines:
                    await stack.enter_async_context(_chat_endpoint(cfg, access, parts))
                await work_together(cfg, engines, stop, beacon)
        finally:
            await shut_down(engines)
    finally:
        context.destroy(linger=500)


def _chat_endpoint(
    cfg: RunConfig, access: RunAccess, parts: Parts
) -> AbstractAsyncContextManager[None]:
    """Return the context in which the engine serves chat, if its run directory is here."""
    if access.run_dir is None:
        return nullcontext()
    return serve_engine(cfg, access.run_dir, parts.name, parts.engine, parts.renderer)


async def _build(cfg: RunConfig, access: RunAccess, context: zmq.asyncio.Context) -> list[Parts]:
    """Start the engines, one after another, then connect: an engine that fails never joins."""
    renderer = load_renderer(cfg.model.path, cfg.actor.format)
    renderer.check_room(cfg.actor)
    names = engine_names(access.name, cfg.actor.engines_per_process)
    incarnations = [uuid.uuid4().hex[:12] for _ in names]
    engines: list[Engine] = []
    for number, (name, incarnation) in enumerate(zip(names, incarnations, strict=True)):
        seed = engine_seed(cfg.run.seed, name=name, incarnation=incarnation)
        with visible_gpus(number, cfg.actor):
            engines.append(await _start_engine(cfg, access, renderer, seed=seed))
    hubs = Hubs(access.book.hubs, cfg.actor, style=cfg.envhub.style, owner=incarnations[0])
    usage = ProcessUsage(num_engines=len(names))
    return [
        await _connect(
            cfg,
            access,
            context=context,
            name=name,
            incarnation=incarnation,
            engine=engine,
            renderer=renderer,
            hubs=hubs,
            usage=usage,
        )
        for name, incarnation, engine in zip(names, incarnations, engines, strict=True)
    ]


async def _start_engine(
    cfg: RunConfig, access: RunAccess, renderer: Renderer, *, seed: int
) -> Engine:
    """Start one engine of this process."""
    is_lockstep = cfg.train.mode == "sync"
    return await Engine.start(
        cfg.model,
        cfg.actor,
        end_of_turn_ids=renderer.end_of_turn_ids,
        seed=seed,
        meters_load=cfg.actor.adapt_concurrency and not is_lockstep,
        has_weights=access.has_weights,
        lora=cfg.learner.lora.in_engine,
        is_repeatable=True,
        records_experts=cfg.algorithm.routing_replay,
    )


async def _connect(
    cfg: RunConfig,
    access: RunAccess,
    *,
    context: zmq.asyncio.Context,
    name: str,
    incarnation: str,
    engine: Engine,
    renderer: Renderer,
    hubs: Hubs,
    usage: ProcessUsage,
) -> Parts:
    """Register one engine at the scheduler, and connect it to learner and hubs."""
    book = access.book
    keys = access.keys
    start_s = cfg.actor.start_timeout_s
    exclusive = asyncio.Lock()
    scheduler = SchedulerClient(
        book,
        keys,
        hello=_hello(name, incarnation),
        context=context,
        silence_s=4 * cfg.scheduler.dead_after_s,
    )
    await scheduler.connect(timeout_s=start_s)
    await scheduler.learn_addresses(timeout_s=start_s)
    await hubs.start(timeout_s=start_s)  # Only the first call connects.
    recordings = _recordings(cfg, access, engine)
    delivery = Delivery(
        book,
        keys,
        window=cfg.actor.delivery_window,
        context=context,
        on_acknowledged=partial(_drop, recordings),
    )
    await delivery.connect(timeout_s=start_s)
    devices = await engine.device_ids()
    weights = WeightLink(
        book,
        keys,
        engine,
        hello=WeightsJoin(actor=name, incarnation=incarnation, devices=devices, version=-1),
        exclusive=exclusive,
        context=context,
        heartbeat_s=cfg.scheduler.heartbeat_s,
    )
    await weights.connect(timeout_s=start_s)
    rounds = Rounds(
        engine,
        max_tokens=cfg.actor.max_turn_tokens,
        exclusive=exclusive,
        num_places=hubs.num_places,
    )
    episodes = EpisodePool(
        cfg.actor,
        actor=name,
        engine=engine,
        renderer=renderer,
        environments=hubs,
        delivery=delivery,
        rounds=rounds if cfg.train.mode == "sync" else None,
        keeps_last=cfg.algorithm.advantage is Advantage.PPO,
        agents=agents_of(cfg.actor, actor=name, renderer=renderer),
        recordings=recordings,
        max_lag_steps=bound_of_parts(cfg),
    )
    return Parts(
        name=name,
        engine=engine,
        renderer=renderer,
        hubs=hubs,
        scheduler=scheduler,
        delivery=delivery,
        weights=weights,
        episodes=episodes,
        usage=usage,
    )


def _drop(recordings: Recordings | None, episode_id: str) -> None:
    """Remove the record of an episode that the learner has."""
    if recordings is not None:
        recordings.drop(episode_id)


def _recordings(cfg: RunConfig, access: RunAccess, engine: Engine) -> Recordings | None:
    """Return the records of an engine's episodes; None if lost episodes begin anew.

    A joined actor has a folder of its machine. So its episodes continue after the loss of a hub,
    and after its own if an actor of the same machine gets their leases.
    """
    if not cfg.actor.continue_episodes:
        return None
    return Recordings(
        access.records,
        temperature=cfg.actor.temperature,
        groups=cfg.groups,
        why_not=why_not_of(cfg, lambda: engine.version),
    )


def _hello(name: str, incarnation: str) -> Hello:
    """Return the actor's first message to the scheduler, before its engine has weights."""
    code = code_name()
    return Hello(role="actor", name=name, incarnation=incarnation, version=-1, commit=code)
