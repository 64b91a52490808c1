"""Departed members are known at once and silent members soon: no role waits for them."""

from common.wire.messages import Goodbye
from tests.configs import edited
from tests.scheduler.builders import Table, ids, joined, make_config


def _table() -> Table:
    """A heartbeat is due every second, and 10 s of silence mean death."""
    table = Table(make_config())
    for name in ("learner-0", "actor-0", "actor-1"):
        table.hello(name, incarnation=f"life of {name}")
    return table


def _leave(table: Table, name: str, incarnation: str) -> None:
    role = name.partition("-")[0]
    goodbye = Goodbye(role=role, name=name, incarnation=incarnation)
    assert table.core.handle(name, goodbye) is None


def _silent(table: Table) -> list[str]:
    return table.beat("learner-0", []).silent


def test_leaving_actors_leases_are_reissued() -> None:
    table = _table()
    first = table.ask("actor-0", 6).leases
    _leave(table, "actor-0", "life of actor-0")
    again = table.ask("actor-1", 8).leases
    assert ids(again)[:6] == ids(first)
    assert {lease.attempt for lease in again[:6]} == {1}
    assert [lease.episode_id for lease in again[6:]] == ["g0000001/2", "g0000001/3"]


def test_goodbye_of_a_former_process_changes_nothing() -> None:
    table = _table()
    leases = table.ask("actor-0", 4).leases
    _leave(table, "actor-0", "an earlier life")
    _leave(table, "nobody", "x")
    assert ids(table.core.lifecycle.leases.of("actor-0")) == ids(leases)
    assert _silent(table) == []


def test_departed_actor_is_reported_to_the_learner_at_once() -> None:
    table = _table()
    _leave(table, "actor-0", "life of actor-0")
    assert _silent(table) == ["life of actor-0"]
    _leave(table, "learner-0", "life of learner-0")
    assert table.core.members.alive("learner") == []


def test_silent_actor_is_reported_after_five_missed_heartbeats() -> None:
    table = _table()
    table.clock.now += 5.0
    table.beat("actor-0", [])
    assert _silent(table) == []
    table.clock.now += 0.1
    assert _silent(table) == ["life of actor-1"]
    assert not table.core.members.by_name["actor-1"].is_dead, "its leases are still its own"
    table.beat("actor-1", [])
    assert _silent(table) == []


def test_dead_and_replaced_processes_are_reported_as_silent() -> None:
    table = _table()
    table.hello("actor-0", incarnation="another life")
    assert _silent(table) == ["life of actor-0"]
    table.clock.now += 10.5
    table.beat("actor-0", [])
    table.core.tick()
    assert table.core.members.by_name["actor-1"].is_dead
    assert sorted(_silent(table)) == ["life of actor-0", "life of actor-1"]


def test_step_answer_lists_the_silent_actors() -> None:
    """The publisher must have the list of silent actors before it sends."""
    table = _table()
    _leave(table, "actor-0", "life of actor-0")
    assert table.step(1).silent == ["life of actor-0"]


def test_actor_that_left_may_come_back() -> None:
    table = _table()
    _leave(table, "actor-0", "life of actor-0")
    table.hello("actor-0", incarnation="life of actor-0")
    assert _silent(table) == []
    assert len(table.ask("actor-0", 4).leases) == 4


def test_spare_replaces_a_silent_actor_and_swaps_roles() -> None:
    cfg = edited(make_config(), {"actor.num_actors": 1, "actor.num_spares": 1})
    table = joined("actor-0", "actor-1", "actor-host-7", cfg=cfg)
    assert table.ask("actor-0", 4).leases
    refused = table.ask("actor-1", 4)
    assert (refused.leases, refused.reason[:6]) == ([], "spare:")
    assert table.ask("actor-host-7", 2).leases, "who joined by itself is none"
    table.clock.now += 5.5 * cfg.scheduler.heartbeat_s
    assert table.ask("actor-1", 4).leases
    table.hello("actor-0", incarnation="i1")
    assert table.ask("actor-0", 4).reason[:6] == "spare:"
    assert table.ask("actor-1", 4).leases


def test_spare_process_replaces_all_engines_of_a_silent_one() -> None:
    changes = {"num_actors": 1, "num_spares": 1, "engines_per_process": 2}
    cfg = edited(make_config(), {f"actor.{key}": value for key, value in changes.items()})
    names = ("actor-0", "actor-0~1", "actor-1", "actor-1~1")
    table = joined(*names, cfg=cfg)
    assert [bool(table.ask(name, 1).leases) for name in names] == [True, True, False, False]
    table.clock.now += 5.5 * cfg.scheduler.heartbeat_s
    assert [bool(table.ask(name, 1).leases) for name in names[2:]] == [True, True]


def test_suspended_scheduler_extends_its_deadlines() -> None:
    """The scheduler was suspended for 90 s: its queue holds the messages of that time."""
    table = _table()
    held = table.ask("actor-0", 6).leases
    table.clock.now += 90.0
    table.core.wake()
    assert table.core.tick()
    assert _silent(table) == []
    assert table.beat("actor-0", ids(held)).revoked == []
    assert table.counts()["reissued"] == 0
    table.clock.now += 10.5
    table.beat("actor-0", ids(held))
    assert table.core.tick()
    assert table.core.members.by_name["actor-1"].is_dead
    assert not table.core.members.by_name["actor-0"].is_dead
