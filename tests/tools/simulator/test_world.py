"""The simulation follows the laws of the scheduler, and arithmetic where that can be done."""

import time
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from common.config.train import TrainMode
from tests.configs import edited
from tests.tools.simulator.builders import make_play, make_simulated
from tools.simulator.config import SimulatorConfig
from tools.simulator.workload import SampledWorkload, SimulatedEpisode
from tools.simulator.world import Prediction, SimulatedRun, SimulatedStep, SimulationStatistics


class Constant:
    """Every episode takes `wall_s`, every step `busy_s`; half of each group succeeds."""

    def __init__(self, *, wall_s: float, busy_s: float) -> None:
        self.wall_s = wall_s
        self.busy_s = busy_s

    def group(self, rng: Random, *, size: int, **_: Any) -> list[SimulatedEpisode]:
        return [make_play(wall_s=self.wall_s, worth=i % 2) for i in range(size)]

    def step_s(self, rng: Random, num_tokens: int, **_: Any) -> float:
        assert num_tokens == 2 * 4 * 40
        return self.busy_s


def _run(cfg: SimulatorConfig, workload: Any = None) -> Prediction:
    return SimulatedRun(cfg, workload or SampledWorkload(cfg.simulator)).run()


def test_learner_limits_the_step_rate_of_fast_actors() -> None:
    seen = _run(make_simulated(num_steps=40), Constant(wall_s=0.2, busy_s=10.0))
    assert seen.steps_per_h == pytest.approx(360.0, rel=0.01)
    assert seen.learner_wait_frac == pytest.approx(0.0, abs=0.01)
    assert seen.trained_per_h == pytest.approx(8 * 360.0, rel=0.01)


def test_gate_limits_the_step_rate_of_slow_episodes() -> None:
    """Two batches are in flight, so two steps in every 100 s, and the delays between them."""
    cfg = make_simulated(num_steps=40, num_actors=1)
    seen = _run(cfg, Constant(wall_s=100.0, busy_s=1.0))
    assert seen.steps_per_h == pytest.approx(72.0, rel=0.03)
    assert seen.learner_wait_frac > 0.9


def test_sync_step_alternates_episodes_and_training() -> None:
    cfg = make_simulated(num_steps=40)
    cfg = replace(cfg, train=replace(cfg.train, mode=TrainMode.SYNC))
    seen = _run(cfg, Constant(wall_s=8.0, busy_s=2.0))
    assert seen.steps_per_h == pytest.approx(360.0, rel=0.03)
    assert set(seen.lag_counts) == {0}
    assert seen.actor_idle_frac > 0.15


def test_prediction_depends_on_the_seed_only() -> None:
    cfg = make_simulated(speed_sigma=0.3, mtbf_h=0.1, failed_frac=0.02)
    assert _run(cfg) == _run(cfg)
    other = replace(cfg, run=replace(cfg.run, seed=1))
    assert _run(cfg) != _run(other)


def test_every_simulated_episode_has_one_outcome() -> None:
    cfg = make_simulated(num_steps=60, num_actors=8, mtbf_h=0.05, restart_s=20.0, failed_frac=0.05)
    world = SimulatedRun(cfg, SampledWorkload(cfg.simulator))
    seen = world.run()
    assert seen.stopped_by == ""
    assert seen.num_steps == 60
    assert seen.num_deaths > 10
    assert seen.num_reissued > 0
    assert seen.failed_frac > 0
    world._core.lifecycle.assert_balanced()


def test_stopped_simulation_gives_its_reason() -> None:
    cfg = make_simulated(num_steps=200, failed_frac=0.6)
    cfg = edited(cfg, {"scheduler.max_failed_frac": 0.2})
    assert "max_failed_frac" in _run(cfg).stopped_by


def test_lag_at_consumption_stays_within_the_bound() -> None:
    cfg = make_simulated(num_steps=60, num_actors=6, max_ahead_steps=4, tail_frac=0.1)
    cfg = edited(cfg, {"learner.max_lag_steps": 2, "scheduler.max_stretch": 1.0})
    seen = _run(cfg)
    assert max(seen.lag_counts) <= 2
    assert seen.stale_frac > 0


@pytest.mark.long
@pytest.mark.slow
def test_long_tail_makes_async_twice_as_fast_as_sync() -> None:
    cfg = make_simulated(hours=1.5, num_actors=4, turn_s=2.0, step_s=2.0)
    cfg = edited(cfg, {"groups.per_step": 8})
    slow = replace(cfg, train=replace(cfg.train, mode=TrainMode.SYNC))
    assert _run(cfg).trained_per_h >= 2 * _run(slow).trained_per_h


def test_lease_sizes_never_limit_equal_actors() -> None:
    """As with one actor, two batches are in flight; no other actor would play them sooner."""
    cfg = make_simulated(num_steps=60, num_actors=2)
    workload = Constant(wall_s=100.0, busy_s=1.0)
    assert _run(cfg, workload).steps_per_h == pytest.approx(72.0, rel=0.03)
    cfg = edited(cfg, {"scheduler.size_leases": False})
    assert _run(cfg, workload).steps_per_h == pytest.approx(72.0, rel=0.03)


def test_late_actors_speed_up_waiting_run() -> None:
    workload = Constant(wall_s=50.0, busy_s=0.5)
    cfg = make_simulated(num_steps=30, num_actors=8, max_ahead_steps=3)
    cfg = edited(cfg, {"actor.max_concurrent": 4, "scheduler.size_leases": False})
    few = replace(cfg, simulator=replace(cfg.simulator, num_actors=2))
    assert _run(cfg, workload).steps_per_h > 2.5 * _run(few, workload).steps_per_h


def test_idle_actors_are_counted() -> None:
    cfg = make_simulated(num_steps=20, num_actors=100)
    assert _run(cfg, Constant(wall_s=5.0, busy_s=5.0)).actor_idle_frac > 0.9


def test_predicted_lag_is_a_mean_over_sampled_tokens() -> None:
    tally = SimulationStatistics()
    for number, (lag_sum, num_sampled) in enumerate([(0.0, 10), (0.0, 10), (60.0, 30), (0.0, 30)]):
        tally.add_step(
            SimulatedStep(
                ended_s=float(number),
                wait_s=0.0,
                num_arrived=number,
                num_trained=1,
                lag_sum=lag_sum,
                num_sampled_tokens=num_sampled,
            )
        )
    assert tally.rates()["lag_mean"] == pytest.approx(60 / 70)


def test_mean_version_weights_each_by_its_time() -> None:
    tally = SimulationStatistics(published_s=[10.0, 30.0])
    assert tally.mean_version(0, 0.0, 10.0) == 0.0
    assert tally.mean_version(0, 0.0, 20.0) == 0.5
    assert tally.mean_version(0, 0.0, 40.0) == pytest.approx((20.0 + 2 * 10.0) / 40.0)
    assert tally.mean_version(1, 15.0, 25.0) == 1.0


@pytest.mark.long
@pytest.mark.slow
def test_simulating_a_thousand_actors_for_a_day_takes_a_minute() -> None:
    """Measured on a quarter of both."""
    cfg = make_simulated(hours=6.0, num_actors=1000, mtbf_h=24.0, speed_sigma=0.3, join_s=600.0)
    cfg = edited(cfg, {"groups.size": 8, "groups.per_step": 8})
    started_s = time.process_time()
    seen = _run(cfg)
    assert seen.simulated_h == pytest.approx(6.0)
    assert (
        time.process_time() - started_s < 30.0
    )  # twice a quarter of a minute: cores may share their units


@pytest.mark.long
def test_simulated_lag_bound_stretches_like_the_schedulers() -> None:
    cfg = make_simulated(num_steps=60, num_actors=6, max_ahead_steps=4, turn_s=10.0, step_s=2.0)
    cfg = edited(cfg, {"learner.max_lag_steps": 1, "scheduler.max_stretch": 3.0})
    assert 1 < max(_run(cfg).lag_counts) <= 3


class Uneven(Constant):
    """Every other episode takes ten times longer."""

    def group(self, rng: Random, *, size: int, **_: Any) -> list[SimulatedEpisode]:
        return [make_play(wall_s=(1.0, 10.0)[i % 2], worth=i % 2) for i in range(size)]


def test_sync_actor_requests_leases_after_finishing_all() -> None:
    """Four slots for eight episodes: twice 10 s, then 1 s of training."""
    cfg = make_simulated(num_steps=40, num_actors=1)
    cfg = replace(cfg, train=replace(cfg.train, mode=TrainMode.SYNC))
    cfg = edited(cfg, {"actor.max_concurrent": 4})
    seen = _run(cfg, Uneven(wall_s=0.0, busy_s=1.0))
    assert seen.steps_per_h == pytest.approx(3600.0 / 21.0, rel=0.03)


def test_dead_actor_is_missed_by_the_scheduler() -> None:
    cfg = make_simulated(hours=0.5, num_actors=1, mtbf_h=0.01, restart_s=1e6)
    world = SimulatedRun(cfg, SampledWorkload(cfg.simulator))
    seen = world.run()
    assert seen.num_deaths == 1
    assert world._core.members.by_name["actor-0"].is_dead
    assert seen.simulated_h == pytest.approx(0.5)


class Jittered(Constant):
    """Episodes take half to one and a half of `wall_s`."""

    def group(self, rng: Random, *, size: int, **_: Any) -> list[SimulatedEpisode]:
        return [
            make_play(wall_s=self.wall_s * rng.uniform(0.5, 1.5), worth=i % 2) for i in range(size)
        ]

    def step_s(self, rng: Random, num_tokens: int, **_: Any) -> float:
        return self.busy_s


def test_dead_actor_slows_the_other_for_ten_seconds_at_most() -> None:
    """The gate holds both back, so that what the dead one held would be in the other's way."""
    cfg = make_simulated(num_steps=100_000, restart_s=1e9, hours=0.4)
    cfg = replace(cfg, actor=replace(cfg.actor, max_concurrent=12, min_concurrent=4))
    cfg = replace(cfg, scheduler=replace(cfg.scheduler, dead_after_s=60.0))
    world, ended = SimulatedRun(cfg, Jittered(wall_s=10.0, busy_s=1.0)), []
    deliver = world._fleet._deliver

    def note(arrival: Any) -> None:
        if arrival.actor == "actor-0":
            ended.append(arrival.ended_s)
        deliver(arrival)

    world._fleet._deliver = note
    died_s = 900.0
    world._events.at(died_s, world._fleet._fail, world._fleet.actors[1])
    world.run()

    def pace(start_s: float, stop_s: float) -> float:
        return sum(start_s <= each < stop_s for each in ended) / (stop_s - start_s)

    before = pace(died_s - 300.0, died_s)
    assert pace(died_s + 10.0, died_s + 60.0) > 0.95 * before
    assert pace(died_s + 60.0, died_s + 300.0) > 0.95 * before
