"""An actor process whose engines are clocks; everything on its side of their sockets is real.

`python -m benchmarks.engines.actor RUN_DIR NAME CLOCKS`: CLOCKS is the folder of the clocks'
sockets. The engines never receive weights, so there is no publisher.
"""

import asyncio
import gc
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, cast

import uvloop
import zmq.asyncio

from actor.delivery import Delivery
from actor.engine.engine import Engine
from actor.engine.process_watch import ProcessWatch
from actor.engine.start import connect_llm, engine_arguments, engine_config
from actor.formats.renderer import Renderer
from actor.formats.tools import load_renderer
from actor.loops import Parts, ProcessUsage, shut_down, work_together
from actor.rollout.hubs import Hubs
from actor.rollout.pool import EpisodePool
from actor.scheduler_client import SchedulerClient
from actor.weights.receive import WeightLink
from benchmarks.engines.clocks import addresses_of
from common.config.load import load_config
from common.config.run_config import RunConfig
from common.ids import engine_names
from common.log import configure_logging
from common.stall.beacon import beacon_of
from common.store.run_dir import RunDir
from common.wire.addresses import AddressBook
from common.wire.messages import Hello
from common.wire.security import own_keys

logger = logging.getLogger(__name__)

START_S = 300.0


class FixedWeights:
    """Weights that are loaded and never change, in place of `WeightLink`."""

    is_loading = False

    def __init__(self) -> None:
        self.version_loaded = asyncio.Event()
        self.version_loaded.set()

    async def run(self) -> None:
        """Do nothing until cancelled."""
        while True:
            await asyncio.sleep(3600.0)

    def close(self) -> None: ...


def start_engines(cfg: RunConfig, names: list[str], clocks: Path, renderer: Renderer) -> list[Any]:
    """Return one engine for each name, connected to its clock as to an engine's process."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(cfg.actor.kv_cache_gib))
    config = engine_config(engine_arguments(cfg.model, cfg.actor, seed=0, is_repeatable=True))
    engines: list[Engine] = []
    for name in names:
        addresses = addresses_of(clocks, name)
        llm = connect_llm(config, client_addresses=addresses)
        ends = renderer.end_of_turn_ids
        engines.append(Engine(llm, cfg.actor, end_of_turn_ids=ends, watch=ProcessWatch()))
        engines[-1].version = 0
    return engines


async def play(cfg: RunConfig, run_dir: RunDir, name: str, clocks: Path) -> None:
    """Play until SIGTERM."""
    context = zmq.asyncio.Context()
    names = engine_names(name, cfg.actor.engines_per_process)
    keys = own_keys(run_dir.keys, role="actor", name=name)
    book = AddressBook(lambda: run_dir.find_address("scheduler"))
    renderer = load_renderer(cfg.model.path, cfg.actor.format)
    engines = start_engines(cfg, names, clocks, renderer)
    hubs = Hubs(book.hubs, cfg.actor, style=cfg.envhub.style, owner=name)
    usage = ProcessUsage(num_engines=len(names))
    every: list[Parts] = []
    for own, engine in zip(names, engines, strict=True):
        hello = Hello(role="actor", name=own, incarnation=f"life-{own}", version=0)
        scheduler = SchedulerClient(book, keys, hello=hello, context=context, silence_s=START_S)
        await scheduler.connect(timeout_s=START_S)
        await scheduler.learn_addresses(timeout_s=START_S)
        await hubs.start(timeout_s=START_S)
        delivery = Delivery(book, keys, window=cfg.actor.delivery_window, context=context)
        await delivery.connect(timeout_s=START_S)
        episodes = EpisodePool(
            cfg.actor,
            actor=own,
            engine=engine,
            renderer=renderer,
            environments=hubs,
            delivery=delivery,
            rounds=None,
        )
        weights = cast(WeightLink, FixedWeights())
        links = (hubs, scheduler, delivery, weights)
        every.append(Parts(own, engine, renderer, *links, episodes, usage))
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    logger.info("engines ready num=%d at=%.1f", len(every), time.monotonic())
    try:
        with beacon_of(None, name, start_s=START_S) as beacon:
            await work_together(cfg, every, stop, beacon)
    finally:
        await shut_down(every)
        context.destroy(linger=0)


def main(folder: str, name: str, clocks: str) -> None:
    """Run as one actor process of a run."""
    gc.set_threshold(10_000)  # `run.py` sets the same threshold for every role.
    run_dir = RunDir(root=Path(folder))
    cfg = load_config(str(run_dir.config), [])
    configure_logging(name, cfg.log.level)
    uvloop.run(play(cfg, run_dir, name, Path(clocks)))


if __name__ == "__main__":
    main(*sys.argv[1:])
