"""The concurrency limit follows the engine's load metrics; numbers by hand."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from actor.engine.concurrency import Concurrency, EngineLoad
from actor.rollout.pool import EpisodePool
from common.config.actor import ActorSection

IDLE = EngineLoad(num_steps=50, num_queued=0, kv_frac=0.3, num_preemptions=0)
PREEMPTING = EngineLoad(num_steps=50, num_queued=0, kv_frac=0.95, num_preemptions=1)
QUEUEING = EngineLoad(num_steps=50, num_queued=1, kv_frac=0.5, num_preemptions=0)


def test_idle_engine_keeps_limit_at_the_ceiling() -> None:
    concurrency = Concurrency(least=1, most=64)
    assert concurrency.limit == 64
    assert [concurrency.adjust(IDLE, num_episodes=64) for _ in range(3)] == [64, 64, 64]


@pytest.mark.parametrize("load", [PREEMPTING, QUEUEING])
def test_overload_cuts_limit_by_quarters_to_floor(load: EngineLoad) -> None:
    concurrency = Concurrency(least=10, most=32)
    limits = [concurrency.adjust(load, num_episodes=concurrency.limit) for _ in range(5)]
    assert limits == [24, 18, 13, 10, 10]


def test_limit_waits_until_a_cut_takes_effect() -> None:
    concurrency = Concurrency(least=1, most=32)
    assert concurrency.adjust(PREEMPTING, num_episodes=32) == 24
    assert concurrency.adjust(PREEMPTING, num_episodes=25) == 24
    assert concurrency.adjust(PREEMPTING, num_episodes=24) == 18


@pytest.mark.parametrize(("most", "increase"), [(8, 1), (64, 2), (256, 8)])
def test_limit_grows_by_a_constant_increment(most: int, increase: int) -> None:
    concurrency = Concurrency(least=1, most=most)
    low = concurrency.adjust(PREEMPTING, num_episodes=most)
    grown = [concurrency.adjust(IDLE, num_episodes=concurrency.limit) for _ in range(200)]
    assert grown[0] == low + increase
    assert grown[1] == min(most, low + 2 * increase)
    assert grown[-1] == most


def test_unused_limit_does_not_grow() -> None:
    concurrency = Concurrency(least=1, most=32)
    concurrency.adjust(PREEMPTING, num_episodes=32)
    assert concurrency.adjust(IDLE, num_episodes=22) == 24
    assert concurrency.adjust(IDLE, num_episodes=23) == 25


def test_full_cache_without_preemption_keeps_the_limit() -> None:
    concurrency = Concurrency(least=1, most=32)
    concurrency.adjust(PREEMPTING, num_episodes=32)
    full = EngineLoad(num_steps=50, num_queued=0, kv_frac=0.91, num_preemptions=0)
    assert concurrency.adjust(full, num_episodes=24) == 24


def test_nearly_idle_engine_leaves_limit_unchanged() -> None:
    concurrency = Concurrency(least=1, most=32)
    few = EngineLoad(num_steps=4, num_queued=9, kv_frac=0.1, num_preemptions=0)
    assert concurrency.adjust(few, num_episodes=32) == 32
    concurrency.adjust(PREEMPTING, num_episodes=32)
    assert concurrency.adjust(EngineLoad(), num_episodes=24) == 24


def test_meter_aggregates_queue_cache_and_preemptions() -> None:
    meter = EngineLoad()
    meter.add(num_running=6, num_waiting=2, kv_frac=0.5, num_preemptions=1)
    meter.add(num_running=10, num_waiting=3, kv_frac=0.8, num_preemptions=0)
    load = EngineLoad(num_steps=2, num_queued=2, kv_frac=0.8, num_preemptions=1)
    assert meter.drain() == load
    assert meter.drain() == EngineLoad()


def test_short_burst_counts_as_no_queue() -> None:
    meter = EngineLoad()
    for num_waiting in (50, 40, 30, 20, 10, 0, 40):
        meter.add(num_running=12, num_waiting=num_waiting, kv_frac=0.1, num_preemptions=0)
    assert meter.drain().num_queued == 0


def test_stalled_engine_reports_no_queue() -> None:
    meter = EngineLoad()
    for _ in range(9):
        meter.add(num_running=0, num_waiting=12, kv_frac=0.0, num_preemptions=0)
    assert meter.drain() == EngineLoad()


def test_new_ceiling_moves_a_limit_that_was_at_the_old_one() -> None:
    concurrency = Concurrency(least=1, most=32)
    concurrency.set_bounds(least=1, most=48)
    assert concurrency.limit == 48
    assert concurrency.adjust(PREEMPTING, num_episodes=48) == 36
    concurrency.set_bounds(least=1, most=64)
    assert concurrency.limit == 36  # The load has set it, and load alone raises it.
    concurrency.set_bounds(least=1, most=20)
    assert concurrency.limit == 20
    concurrency.set_bounds(least=24, most=64)
    assert concurrency.limit == 64


def test_bound_above_the_batch_of_the_engine_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def law() -> None:
        absent: Any = None
        start = ActorSection(max_concurrent=4, min_concurrent=1)
        pool = EpisodePool(
            start,
            actor="a",
            engine=absent,
            renderer=absent,
            environments=absent,
            delivery=absent,
            rounds=None,
        )
        for num in (3, 4, 6):
            caplog.clear()
            cfg = replace(start, max_concurrent=num)
            pool.configure(cfg, max_lag_steps=0, why_not=absent)
            assert pool.num_slots == num
            assert ("batch of 4 requests" in caplog.text) == (num > 4)

    asyncio.run(law())
