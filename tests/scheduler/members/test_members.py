"""Laws of members: their presence, their speed and the cost of a lookup."""

import time

import pytest

from common.wire.messages import Hello
from scheduler.members.members import Members, RunMember
from tests.scheduler.builders import Table, make_config


def _with_actors(num: int) -> Table:
    table = Table(make_config())
    table.hello("learner-0")
    for i in range(num):
        table.hello(f"actor-{i}")
    return table


def test_episodes_of_one_report_are_concurrent() -> None:
    table = _with_actors(1)
    table.arrive(table.ask("actor-0", 8).leases)
    member = table.core.members.by_name["actor-0"]
    assert (member.num_finished, member.held_mean) == (8, 8.0)
    assert member.episodes_per_s == 8.0  # Each takes one second.
    table.ask("actor-0", 8)
    assert table.core.members.by_name["actor-0"].held_mean == 8.0


def test_running_episodes_count_as_concurrent() -> None:
    table = _with_actors(1)
    leases = table.ask("actor-0", 8).leases
    table.arrive(leases[:2])
    assert table.core.members.by_name["actor-0"].held_mean == 8.0
    table.arrive(leases[2:])
    assert table.core.members.by_name["actor-0"].held_mean == pytest.approx((2 * 8 + 6 * 6) / 8)


@pytest.mark.parametrize(("wall_s", "is_slow"), [(9.0, False), (14.0, False), (16.0, True)])
def test_actor_is_slow_above_one_and_a_half_usual_times(wall_s: float, is_slow: bool) -> None:
    members = _members()
    for _ in range(3):
        members.finished("actor-0", wall_s=wall_s, num_held=1, usual_s=10.0)
    assert members.by_name["actor-0"].is_slow is is_slow


def test_one_long_episode_marks_no_actor_slow() -> None:
    members = _members()
    for wall_s in (*[10.0] * 20, 100.0):
        members.finished("actor-0", wall_s=wall_s, num_held=1, usual_s=10.0)
    assert not members.by_name["actor-0"].is_slow


def test_actor_with_unknown_episode_kinds_is_not_slow() -> None:
    members = _members()
    members.finished("actor-0", wall_s=1e6, num_held=1, usual_s=None)
    assert not members.by_name["actor-0"].is_slow


def test_learner_lookup_scans_no_actors() -> None:
    """Beside 5,000 actors a report takes as long as beside five."""

    def least_s(table: Table) -> float:
        rounds: list[float] = []
        for _ in range(20):
            started = time.process_time()
            for _ in range(50):
                table.report()
            rounds.append(time.process_time() - started)
        return min(rounds)

    few, many = _with_actors(5), _with_actors(5_000)
    assert least_s(many) < 4 * least_s(few)


def test_reporting_learner_stays_alive_after_a_scheduler_restart() -> None:
    table = _with_actors(1)
    other = Table(table.cfg, clock=table.clock)
    other.core.restore(table.core.snapshot())
    table.clock.now += 9.0
    other.report()
    table.clock.now += 9.0
    other.core.tick()
    alive = [member.name for member in other.core.members.alive("learner")]
    assert (alive, other.core.members.by_name["actor-0"].is_dead) == (["learner-0"], True)


def _members() -> Members:
    members = Members(dead_after_s=10.0, silent_after_s=5.0)
    members.hello(Hello(role="actor", name="actor-0", incarnation="i", version=0), 0.0)
    assert isinstance(members.by_name["actor-0"], RunMember)
    return members


def test_silent_actors_work_moves_only_if_another_is_alive() -> None:
    members = Members(dead_after_s=60.0, silent_after_s=5.0)
    for name in ("a", "b"):
        members.hello(Hello(role="actor", name=name, incarnation=f"{name}-1", version=0), 0.0)
    assert members.newly_silent(5.0) == []
    assert members.newly_silent(5.1) == [], "nobody is heard"
    members.touch(members.by_name["a"], 5.0)
    assert [m.name for m in members.newly_silent(5.1)] == ["b"]
    assert members.newly_silent(6.0) == [], "once"
    members.touch(members.by_name["b"], 7.0)
    assert [m.name for m in members.newly_silent(11.0)] == ["a"]
