"""Members that take far too long are taken away, and issued again once they are let go."""

from typing import Any

from common.wire.messages import EndReason, GroupArrived, Lease, Outcome
from scheduler.state import save
from tests.configs import edited
from tests.scheduler.builders import Table, ids, make_config, outcome_of


def _table(*, factor: float = 3.0, max_attempts: int = 3) -> tuple[Table, list[Lease]]:
    """actor-0 holds a group; such episodes take 20 s, so a straggler has had more than 60 s."""
    cfg = make_config(max_attempts=max_attempts)
    cfg = edited(cfg, {"groups.straggler_factor": factor})
    table = Table(cfg)
    for name in ("learner-0", "actor-0", "actor-1"):
        table.hello(name)
    leases = table.ask("actor-0", 4).leases
    for _ in range(20):
        table.core.parts.pace.add_episode("maze", leases[0].horizon, 20.0)
    return table, leases


def _wait(table: Table, seconds: float, **running: Any) -> dict[str, list[str]]:
    """Let time pass with all heartbeats; return the revoked episodes of each actor."""
    table.clock.now += seconds
    table.beat("learner-0", [])
    return {name: table.beat(f"actor-{name[1:]}", held).revoked for name, held in running.items()}


def test_straggler_is_revoked_exactly_after_its_factor() -> None:
    table, leases = _table()
    assert _wait(table, 60.0, a0=ids(leases)) == {"a0": []}
    assert _wait(table, 0.5, a0=ids(leases)) == {"a0": ids(leases)}


def test_straggler_is_reissued_once_its_actor_drops_it() -> None:
    table, leases = _table()
    _wait(table, 61.0, a0=ids(leases))
    assert set(ids(table.ask("actor-1", 4).leases)).isdisjoint(ids(leases))
    assert _wait(table, 1.0, a0=ids(leases[:1])) == {"a0": ids(leases[:1])}  # has one still
    again = table.ask("actor-1", 4).leases
    assert ids(again)[:3] == ids(leases[1:])
    assert {lease.attempt for lease in again[:3]} == {1}
    assert {(x.horizon, x.horizon_stage) for x in again[:3]} == {(leases[0].horizon, 0)}


def test_straggler_that_arrives_before_release_counts() -> None:
    table, leases = _table()
    _wait(table, 61.0, a0=ids(leases))
    table.arrive(leases)
    table.finish_group("g0000000", Outcome.TRAINED)
    assert table.counts()["trained"] == 4
    assert table.counts()["reissued"] == 0


def test_straggler_without_attempts_fails_and_its_group_continues() -> None:
    table, leases = _table(max_attempts=1)
    table.arrive(leases[1:])
    _wait(table, 61.0, a0=ids(leases[:1]))
    _wait(table, 1.0, a0=[])
    assert table.beat("learner-0", []).revoked == ids(leases[:1])
    table.report(groups=[GroupArrived(group_id="g0000000", is_ready=True)])
    table.report(outcomes=[outcome_of(x.episode_id, Outcome.TRAINED) for x in leases[1:]])
    counts = table.counts()
    assert (counts["trained"], counts["failed"]) == (3, 1)
    assert counts["causes"] == {"failed:straggler": 1}


def test_stragglers_need_a_positive_factor_and_a_live_learner() -> None:
    table, leases = _table(factor=0.0)
    assert _wait(table, 900.0, a0=ids(leases)) == {"a0": []}
    table, leases = _table()
    table.clock.now += 11.0
    table.beat("actor-0", ids(leases))
    table.core.tick()  # the learner is dead
    table.clock.now += 60.0
    assert table.beat("actor-0", ids(leases)).revoked == []


def test_failed_episode_does_not_change_the_straggler_limit() -> None:
    table, leases = _table()
    before = save(table.core.parts.pace)
    table.arrive(leases, end_reason=EndReason.DEADLINE)
    assert save(table.core.parts.pace) == before
