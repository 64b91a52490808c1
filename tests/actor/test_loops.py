"""Laws of several engines behind one actor process."""

import asyncio
import os
from pathlib import Path
from typing import Any, cast

import pytest

from actor.loops import Parts, ProcessUsage, work_together
from common.config.model import ModelSection
from common.config.run_config import RunConfig
from common.errors import EngineError
from common.memory import resident_bytes
from common.stall.beacon import Beacon
from common.store.run_dir import RunDir


def test_engines_of_a_process_report_equal_shares_of_its_memory() -> None:
    pid = os.getpid()
    usage = ProcessUsage(num_engines=4)
    usage.measure_if_due(0.0)
    whole = resident_bytes([pid])[pid]
    assert 0.2 * whole < usage.rss_bytes < 0.3 * whole
    first = usage.cpu_s
    usage.measure_if_due(9.0)  # The next measurement is due after ten seconds.
    assert usage.cpu_s == first > 0.0


class IdleEngine:
    """An engine whose links wait until the test ends them; its episodes fail on request."""

    def __init__(self) -> None:
        self.is_running = False
        self.is_finished = asyncio.Event()
        self.version_loaded = asyncio.Event()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.meter = self.live_config = None
        self.beats: list[Any] = []
        self.num_slots = self.num_sampled_tokens = self.version = self.num_ended = 0
        self.running_ids: list[str] = []
        self.pending_ids: list[str] = []

    async def run(self, *_: object) -> None:
        self.is_running = True
        try:
            await asyncio.Event().wait()
        finally:
            self.is_running = False

    def revoke(self, ids: list[str]) -> None: ...
    async def drained(self) -> None: ...
    async def cancel_all(self, *, is_run_over: bool = False) -> None: ...
    def beat(self, heartbeat: Any) -> None:
        self.beats.append(heartbeat)


def parts_of(name: str, engine: IdleEngine) -> Parts:
    whole = cast(Any, engine)
    links = (whole, whole, whole, whole)
    return Parts(name, whole, whole, *links, whole, ProcessUsage(num_engines=2))


CFG = RunConfig(model=ModelSection(path="m"))


def test_failure_of_one_engine_ends_all_of_its_process(tmp_path: Path) -> None:
    async def fail() -> list[IdleEngine]:
        engines = [IdleEngine(), IdleEngine()]
        named = [parts_of(f"a~{i}", each) for i, each in enumerate(engines)]
        beacon = Beacon(RunDir(root=tmp_path), "a")
        task = asyncio.create_task(work_together(CFG, named, asyncio.Event(), beacon))
        while not all(each.is_running and each.beats for each in engines):
            await asyncio.sleep(0)
        engines[1].failed.set_exception(EngineError("engine died"))
        with pytest.raises(EngineError, match="engine died"):
            await task
        return engines

    assert [each.is_running for each in asyncio.run(fail())] == [False, False]


def test_end_of_the_run_ends_all_engines_without_an_error(tmp_path: Path) -> None:
    async def end() -> list[IdleEngine]:
        engines = [IdleEngine(), IdleEngine()]
        named = [parts_of(f"a~{i}", each) for i, each in enumerate(engines)]
        beacon = Beacon(RunDir(root=tmp_path), "a")
        for each in engines:
            each.is_finished.set()
        await work_together(CFG, named, asyncio.Event(), beacon)
        return engines

    engines = asyncio.run(end())
    assert [each.is_running for each in engines] == [False, False]
    assert {each.beats[0].name for each in engines} == {"a~0", "a~1"}
