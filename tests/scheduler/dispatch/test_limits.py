"""The bounds that follow from the measured pace."""

import json

import pytest

from common.wire.messages import LagBound
from scheduler.dispatch.limits import DispatchLimits, lag_bound, lease_cap, needed_ahead_steps
from scheduler.dispatch.pace import Pace
from scheduler.state import restore, save
from tests.scheduler.builders import Table, make_config


def _bound(episode_s: float | None, *, max_stretch: float = 2.0) -> int:
    return lag_bound(
        4, max_stretch=max_stretch, episode_s=episode_s, step_period_s=10.0, max_ahead_steps=1
    )


@pytest.mark.parametrize(
    ("episode_s", "bound"), [(None, 4), (1.0, 4), (30.0, 4), (31.0, 5), (50.0, 6), (999.0, 8)]
)
def test_lag_bound_follows_the_episode_time_within_limits(
    episode_s: float | None, bound: int
) -> None:
    assert _bound(episode_s) == bound


def test_lag_bound_without_stretch_is_the_configured_one() -> None:
    assert _bound(999.0, max_stretch=1.0) == 4


@pytest.mark.parametrize(
    ("busy_s", "group_s", "signal_frac", "num"),
    [(2.0, 3.0, 0.5, 5), (2.0, 3.0, 1.0, 3), (9.0, 3.0, 1.0, 1), (None, 3.0, 1.0, 0)],
)
def test_needed_steps_ahead_cover_the_time_of_a_batch(
    busy_s: float | None, group_s: float, signal_frac: float, num: int
) -> None:
    needed = needed_ahead_steps(busy_s=busy_s, group_s=group_s, signal_frac=signal_frac, margin=1.5)
    assert needed == num


def test_lease_cap_is_the_work_finished_in_time() -> None:
    assert lease_cap(episodes_per_s=0.5, step_period_s=2.0, num_steps=3) == 3
    assert lease_cap(episodes_per_s=0.01, step_period_s=2.0, num_steps=3) == 1


def test_pace_is_a_high_quantile_of_episode_time() -> None:
    pace = Pace()
    for second in range(1, 20):
        pace.add_episode("maze", 10, float(second))
    assert pace.episode_s("maze", 10) is None  # 19 are too few
    pace.add_episode("maze", 10, 20.0)
    assert pace.episode_s("maze", 10) == 19.0
    assert pace.episode_s("maze", 30) == 57.0  # The time of an unseen horizon is proportional.
    assert pace.episode_s("maze", 5) == 19.0
    assert pace.episode_s("other", 10) is None


def test_waiting_learner_widens_the_gate() -> None:
    pace = Pace()
    pace.add_step(0.0, busy_s=2.0, wait_s=0.2)
    assert pace.boost == 1.25
    pace.add_step(3.0, busy_s=2.0, wait_s=0.0)
    assert pace.boost == pytest.approx(1.225)
    assert pace.step_period_s == 3.0
    assert pace.steady_busy_s is None  # two steps are no measure


def test_lag_bounds_reach_the_learner_and_survive_a_restart() -> None:
    table = Table(make_config())
    table.hello("learner-0")
    table.hello("actor-0")
    pace = table.core.parts.pace
    for _ in range(20):
        pace.add_episode("maze", 5, 55.0)
    for version in (1, 2):
        table.clock.now += 10.0
        table.step(version)
    bounds = table.beat("learner-0", []).lag_bounds
    assert bounds == [LagBound(env="maze", horizon=5, max_lag_steps=7)]
    assert table.beat("actor-0", []).lag_bounds == []
    other = Table(table.cfg, clock=table.clock)
    other.core.restore(json.loads(json.dumps(table.core.snapshot())))
    assert other.beat("learner-0", []).lag_bounds == bounds


def test_gate_tightened_by_learner_survives_restart() -> None:
    limits = _limits()
    limits.update(Pace(), max_ahead_steps=0)
    other = _limits()
    restore(other, save(limits))
    assert other.max_ahead_steps == 0


def _limits() -> DispatchLimits:
    scheduler = make_config().scheduler
    return DispatchLimits(scheduler=scheduler, max_lag_steps=4, group_size=4, is_sync=False)
