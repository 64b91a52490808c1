"""Actors of different speeds share the work by their capacity."""

import pytest

from tests.configs import edited
from tests.scheduler.builders import Table, make_config
from tests.scheduler.fleet import Fleet, SimActor


def _fast(name: str, *, joins_at_s: float = 0.0) -> SimActor:
    return SimActor(name, lambda num: 1.0 + 0.02 * num, joins_at_s=joins_at_s)


def _slow(name: str) -> SimActor:
    """Plays one episode in 2.5 s and 32 in 49 s."""
    return SimActor(name, lambda num: 1.0 + 1.5 * num)


def _fleet(*, size_leases: bool) -> Fleet:
    cfg = make_config(num_steps=100_000, size=4, per_step=8, max_ahead_steps=1)
    cfg = edited(cfg, {"scheduler.size_leases": size_leases})
    actors = [_fast("actor-fast"), _slow("actor-slow"), _fast("actor-late", joins_at_s=60.0)]
    return Fleet(cfg, actors, busy_s=1.0)


def test_slow_actor_does_not_hoard_and_late_actor_gets_work() -> None:
    fleet = _fleet(size_leases=True)
    fast, slow, late = fleet.actors
    fleet.run(100.0)
    fleet.max_held.clear()
    fleet.lags.clear()
    before = fast.num_finished, slow.num_finished, late.num_finished
    fleet.run(200.0)
    done = [actor.num_finished - num for actor, num in zip(fleet.actors, before, strict=True)]
    assert fleet.max_held["actor-slow"] <= 6
    assert done[1] > 30  # The slow actor still contributes.
    assert done[0] / done[2] == pytest.approx(1.0, abs=0.25)
    assert fleet.stale_frac("actor-slow", max_lag_steps=4) < 0.05
    assert fleet.stale_frac("actor-fast", max_lag_steps=4) == 0.0
    fleet.table.core.lifecycle.assert_balanced()


def test_unsized_leases_make_slow_actor_stale() -> None:
    fleet = _fleet(size_leases=False)
    fleet.run(100.0)
    fleet.lags.clear()
    fleet.run(200.0)
    assert fleet.max_held["actor-slow"] >= 16
    assert fleet.stale_frac("actor-slow", max_lag_steps=4) == 1.0


def test_actor_that_is_alone_may_have_all() -> None:
    cfg = make_config(num_steps=100_000, size=4, per_step=8, max_ahead_steps=1)
    fleet = Fleet(cfg, [_slow("actor-slow")], busy_s=1.0)
    fleet.run(300.0)
    assert fleet.max_held["actor-slow"] == 64


def test_fast_actors_need_narrow_gate_only() -> None:
    cfg = make_config(num_steps=100_000, size=4, per_step=8, max_ahead_steps=2)
    fleet = Fleet(cfg, [SimActor("actor-0", lambda _: 0.5, num_slots=96)], busy_s=4.0)
    fleet.run(60.0)
    waited_s = fleet.wait_s
    fleet.lags.clear()
    fleet.run(200.0)
    assert fleet.wait_s == waited_s
    limits = fleet.table.core.status()["limits"]
    assert limits["needed_ahead_steps"] == 1
    lag_mean = sum(lag * num for (_, lag), num in fleet.lags.items()) / fleet.lags.total()
    assert lag_mean < 1.3  # Three batches in flight would give 2.


def test_grant_reports_speed_or_gate_as_its_bound() -> None:
    table = Table(make_config(per_step=2, size=4))
    for name in ("actor-0", "actor-1"):
        table.hello(name)
    table.core.parts.pace.step_period_s = 1.0
    grant = table.ask("actor-0", 12)  # Its speed is unknown: two groups.
    assert (len(grant.leases), grant.reason[:6]) == (8, "speed:")
    table.ask("actor-1", 16)
    table.core.parts.pace.step_period_s = None
    assert table.ask("actor-0", 9).reason == "gate: 4 groups are ahead of the learner"
