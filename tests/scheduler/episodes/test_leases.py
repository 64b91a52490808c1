"""Leases are renewed, lost, taken back and issued again."""

from tests.scheduler.builders import Table, ids, joined


def let_die(table: Table) -> None:
    """All roles fall silent, and actor-1 comes."""
    table.clock.now += 11
    table.hello("actor-1")
    table.core.tick()


def test_dead_actors_lease_is_reissued_as_the_next_attempt() -> None:
    table = joined()
    first = table.ask("actor-0", 4).leases
    let_die(table)
    second = table.ask("actor-1", 4).leases
    assert ids(second) == ids(first)
    assert {lease.attempt for lease in second} == {1}
    assert table.counts()["reissued"] == 4


def test_dead_actors_remaining_members_go_to_the_next_actor() -> None:
    table = joined()
    leases = table.ask("actor-0", 2).leases
    table.arrive(leases)
    let_die(table)
    assert ids(table.ask("actor-1", 2).leases) == ["g0000000/2", "g0000000/3"]


def test_restarted_actors_lease_is_reissued() -> None:
    table = Table()
    table.hello("actor-0", incarnation="old")
    first = table.ask("actor-0", 2).leases
    table.hello("actor-0", incarnation="new")
    again = table.ask("actor-0", 4).leases
    assert {x.episode_id: x.attempt for x in again} == {
        **{x.episode_id: 1 for x in first},
        "g0000000/2": 0,
        "g0000000/3": 0,
    }


def test_repeated_hello_of_one_process_keeps_its_leases() -> None:
    table = joined()
    first = table.ask("actor-0", 4).leases
    table.hello("actor-0")
    assert set(ids(table.ask("actor-0", 4).leases)).isdisjoint(ids(first))


def test_heartbeat_renews_its_listed_leases() -> None:
    table = joined()
    leases = table.ask("actor-0", 4).leases
    for _ in range(500):  # 2500 s, beyond the 1810 s of a lease
        table.clock.now += 5
        assert table.beat("actor-0", ids(leases)).revoked == []
        table.core.tick()
    assert table.counts()["reissued"] == 0
    assert len(table.core.lifecycle.leases) == 4


def test_lease_past_its_deadline_is_issued_again() -> None:
    table = joined()
    first = table.ask("actor-0", 1).leases
    episode = table.core.lifecycle.leases.of("actor-0")[0]
    assert episode.deadline == table.clock.now + 1800 + 10
    table.clock.now = episode.deadline + 1
    table.hello("actor-0")
    table.core.tick()
    assert ids(table.ask("actor-0", 1).leases) == ids(first)


def test_lease_unlisted_twice_is_lost() -> None:
    table = joined()
    leases = table.ask("actor-0", 2).leases
    kept, missed = leases
    table.clock.now += 8
    table.beat("actor-0", [kept.episode_id])
    assert len(table.core.lifecycle.leases) == 2
    table.beat("actor-0", [kept.episode_id])
    assert ids(table.ask("actor-0", 1).leases) == [missed.episode_id]


def test_lease_unlisted_once_is_kept() -> None:
    table = joined()
    leases = table.ask("actor-0", 1).leases
    for running in ([], ids(leases), [], ids(leases)):
        table.clock.now += 6
        table.beat("actor-0", running)
    assert len(table.core.lifecycle.leases) == 1


def test_revived_actor_takes_its_episodes_back() -> None:
    table = joined()
    leases = table.ask("actor-0", 2).leases
    table.clock.now += 11
    table.core.tick()
    assert len(table.core.lifecycle.leases) == 0
    assert table.beat("actor-0", ids(leases)).revoked == []
    assert len(table.core.lifecycle.leases) == 2
    assert table.counts()["reissued"] == 0


def test_actor_must_abandon_episodes_reissued_to_another() -> None:
    table = joined()
    leases = table.ask("actor-0", 2).leases
    let_die(table)
    table.ask("actor-1", 2)
    assert table.beat("actor-0", ids(leases)).revoked == ids(leases)
    assert table.beat("actor-0", ["g0099999/0", "nonsense"]).revoked == ["g0099999/0", "nonsense"]


def test_no_lease_is_reissued_while_the_learner_is_silent() -> None:
    """An actor stops listing a delivered episode, and only the learner has it."""
    table = joined("actor-0", "learner-0")
    delivered, lost = table.ask("actor-0", 2).leases
    for _ in range(40):
        table.clock.now += 1.0
        table.beat("actor-0", [])
        table.core.tick()
    assert table.core.members.is_learner_away(table.clock.now)
    assert (table.counts()["reissued"], table.counts()["failed"]) == (0, 0)
    assert len(table.core.lifecycle.leases) == 2
    table.hello("learner-0")
    table.beat("actor-0", [])
    table.arrive([delivered])
    for _ in range(8):
        table.clock.now += 1.0
        table.beat("learner-0", [])
        table.beat("actor-0", [])
    assert lost.episode_id in ids(table.ask("actor-0", 1).leases), "it did not come"
    assert table.counts()["reissued"] == 1
