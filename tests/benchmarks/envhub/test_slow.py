"""The environment that waits: the same delays everywhere, with the tail that it promises."""

import asyncio
import statistics
import time

import pytest

from benchmarks.envhub.slow import SlowEnv, is_won, make_spec, own_seed, turn_s
from common.config.envs import EnvsSection
from envhub.env import Style

OPTIONS = {"median_s": "0.3", "sigma": "0.4", "tail_frac": "0.02", "tail_factor": "10"}


def test_delays_are_log_normal_with_a_two_percent_tail():
    plain = OPTIONS | {"tail_frac": "0"}
    delays = [turn_s(f"wait-train-{i}", 7, options=OPTIONS) for i in range(20_000)]
    short = [turn_s(f"wait-train-{i}", 7, options=plain) for i in range(20_000)]
    ratios = [long / each for long, each in zip(delays, short, strict=True)]
    is_long = [ratio > 5 for ratio in ratios]
    assert {round(ratio, 6) for ratio in ratios} == {1.0, 10.0}
    assert sum(is_long) / len(is_long) == pytest.approx(0.02, abs=0.004)
    assert statistics.median(short) == pytest.approx(0.3, rel=0.03)


def test_delay_and_reward_depend_on_item_and_seed():
    first = [turn_s("wait-train-3", seed, options=OPTIONS) for seed in range(8)]
    assert first == [turn_s("wait-train-3", seed, options=OPTIONS) for seed in range(8)]
    assert len(set(first)) == 8
    won = [is_won("wait-train-3", seed) for seed in range(400)]
    assert 150 < sum(won) < 250


def test_members_of_a_group_differ_by_their_first_action():
    seeds = [own_seed("wait-train-3", 7, action) for action in ("left", "right", "left")]
    assert seeds[0] == seeds[2]
    assert seeds[0] != seeds[1]


def test_slow_steps_run_concurrently_and_end_after_the_turns():
    spec = make_spec(EnvsSection(plugins={"median_s": "0.05", "sigma": "0", "num_turns": "2"}))

    async def play(index):
        env = spec.make(Style.COMPACT)
        assert isinstance(env, SlowEnv)
        await env.reset(f"wait-train-{index}", 0)
        results = [await env.step("anything") for _ in range(2)]
        assert [each.done for each in results] == [False, True]
        return results[-1].reward

    async def law():
        return await asyncio.gather(*(play(i) for i in range(400)))

    started = time.monotonic()
    rewards = asyncio.run(law())
    assert 0.1 <= time.monotonic() - started < 20.0  # One after another they take 40 s.
    assert set(rewards) == {0.0, 1.0}
