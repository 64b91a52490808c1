"""Laws of the assembly of groups."""

from dataclasses import replace

import pytest

from common.config.algorithm import AlgorithmSection
from common.config.groups import GroupsSection
from common.wire.messages import EndReason, EpisodeOutcome, GroupArrived, Trajectory
from learner.ingest.buffer import Group, GroupAssembly, is_fresh, oldest_version
from learner.objective.advantages import group_has_signal
from tests.learner.builders import held_by, make_trajectory


def make_table(
    *, size: int = 3, per_step: int = 2, min_size: int = 2, is_lockstep: bool = False
) -> GroupAssembly:
    cfg = GroupsSection(size=size, per_step=per_step, min_size=min_size)
    algorithm = AlgorithmSection()
    return GroupAssembly(
        cfg, algorithm, has_signal=lambda m: group_has_signal(m, algorithm), is_lockstep=is_lockstep
    )


def member(
    group_id: str, number: int, *, reward: float | None = None, version: int = 0
) -> Trajectory:
    """A member; the first of a group wins, the others lose."""
    trajectory = make_trajectory([1, 2], [0, 1], group_id=group_id, member=number, version=version)
    return replace(trajectory, reward=float(number == 0) if reward is None else reward)


def failure(group_id: str, number: int) -> Trajectory:
    return replace(member(group_id, number, reward=0.0), end_reason=EndReason.ENV_ERROR)


def fill(table: GroupAssembly, *group_ids: str, version: int = 0, size: int = 3) -> None:
    for group_id in group_ids:
        for number in range(size):
            table.add(member(group_id, number, version=version))


def fill_equal(table: GroupAssembly, *group_ids: str) -> None:
    """Add groups without signal."""
    for group_id in group_ids:
        for number in range(3):
            table.add(member(group_id, number, reward=1.0))


def take(
    table: GroupAssembly, version: int = 0, *, max_lag_steps: int = 4, in_order: bool = False
) -> tuple[list[Group], list[EpisodeOutcome]]:
    return table.take(version, max_lag_steps=max_lag_steps, in_order=in_order)


def ids(groups: list[Group]) -> list[str]:
    return [group.group_id for group in groups]


def said(outcomes: list[EpisodeOutcome]) -> dict[str, tuple[str, str]]:
    assert len({o.episode_id for o in outcomes}) == len(outcomes)
    return {o.episode_id: (o.outcome.value, o.cause) for o in outcomes}


def test_group_is_ready_with_its_last_member_in_order() -> None:
    table = make_table(per_step=1)
    assert table.add(member("a", 2)) == ([], [])
    assert table.add(member("a", 0)) == ([], [])
    assert (table.num_open, table.num_ready) == (1, 0)
    assert table.add(member("a", 1)) == ([], [GroupArrived(group_id="a", is_ready=True)])
    assert (table.num_open, table.num_ready) == (0, 1)
    groups, outcomes = take(table)
    assert [t.member for t in groups[0].members] == [0, 1, 2]
    assert outcomes == []


def test_the_survivors_of_an_infrastructure_failure_train() -> None:
    table = make_table(per_step=1)
    table.add(failure("a", 1))
    table.add(member("a", 2))
    outcomes, arrived = table.add(member("a", 0))
    assert said(outcomes) == {"a/1": ("failed", "env_error")}
    assert arrived == [GroupArrived(group_id="a", is_ready=True)]
    assert [t.member for t in take(table)[0][0].members] == [0, 2]


def test_too_few_survivors_give_the_group_up() -> None:
    table = make_table()
    table.add(failure("a", 0))
    table.add(failure("a", 1))
    outcomes, arrived = table.add(member("a", 2))
    assert said(outcomes) == {
        "a/0": ("failed", "env_error"),
        "a/1": ("failed", "env_error"),
        "a/2": ("failed", "group_damaged"),
    }
    assert arrived == [GroupArrived(group_id="a", is_ready=False)]
    assert held_by(table) == []


def test_a_group_without_signal_is_filtered() -> None:
    table = make_table()
    table.add(member("a", 0, reward=0.5))
    table.add(failure("a", 1))
    outcomes, arrived = table.add(member("a", 2, reward=0.5))
    assert said(outcomes) == {
        "a/0": ("filtered", "zero_variance"),
        "a/1": ("failed", "env_error"),
        "a/2": ("filtered", "zero_variance"),
    }
    assert arrived == [GroupArrived(group_id="a", is_ready=False)]


def test_a_member_given_up_completes_its_group() -> None:
    table = make_table()
    table.add(member("a", 0))
    table.add(member("a", 1))
    assert table.give_up("a", 2) == ([], [GroupArrived(group_id="a", is_ready=True)])
    assert table.num_ready == 1


def test_giving_up_arrived_member_changes_nothing() -> None:
    table = make_table()
    table.add(member("a", 0))
    assert table.give_up("a", 0) == ([], [])
    table.add(member("a", 1))
    assert table.num_open == 1


def test_late_member_counts_while_its_group_is_open() -> None:
    table = make_table(per_step=1)
    table.give_up("a", 0)
    table.add(member("a", 0))
    table.add(member("a", 1))
    assert table.num_open == 1
    table.add(member("a", 2))
    assert len(take(table)[0][0].members) == 3


def test_nothing_reopens_a_completed_group() -> None:
    table = make_table()
    table.add(member("a", 0))
    table.add(member("a", 1))
    table.give_up("a", 2)
    assert table.give_up("a", 2) == ([], [])
    outcomes, arrived = table.add(member("a", 2))
    assert said(outcomes) == {"a/2": ("failed", "late")}
    assert arrived == []
    assert (table.num_open, table.num_ready) == (0, 1)


def test_leftover_members_of_trained_group_fail() -> None:
    table = make_table()
    table.add(failure("a", 1))
    outcomes, arrived = table.mark_completed("a")
    assert said(outcomes) == {"a/1": ("failed", "env_error")}
    assert arrived == [GroupArrived(group_id="a", is_ready=True)]
    assert table.mark_completed("a") == ([], [])
    assert table.num_open == 0


def test_a_batch_takes_the_oldest_groups_first() -> None:
    table = make_table()
    fill(table, "b", "c", "a")
    assert table.is_batch_ready(0)
    assert ids(take(table)[0]) == ["b", "c"]
    assert not table.is_batch_ready(0)
    assert take(table) == ([], [])
    assert table.num_ready == 1


def test_in_order_the_arrival_plays_no_role() -> None:
    table = make_table()
    fill(table, "c", "a", "b")
    assert ids(take(table, in_order=True)[0]) == ["a", "b"]


def test_short_batch_decision_covers_one_version() -> None:
    table = make_table()
    fill(table, "a")
    assert not table.is_batch_ready(0)
    assert take(table) == ([], [])
    table.decide(0, 1)
    assert table.is_batch_ready(0)
    assert not table.is_batch_ready(1), "the decision was on the batch before"
    assert ids(take(table)[0]) == ["a"]
    fill(table, "b")
    assert take(table, 1) == ([], [])
    table.decide(1, 1)
    assert ids(take(table, 1)[0]) == ["b"]


def test_no_batch_is_ever_empty() -> None:
    table = make_table()
    fill_equal(table, *"uvwxyz")
    table.decide(0, 1)
    assert not table.is_batch_ready(0)
    assert take(table) == ([], [])


def test_trajectory_age_is_that_of_its_oldest_sampled_token() -> None:
    trajectory = make_trajectory([1, 2, 3, 4], [0, 1, 1, 0])
    trajectory.versions[1:3] = [7, 4]
    assert oldest_version(trajectory) == 4
    assert is_fresh(trajectory, 6, max_lag_steps=2)
    assert not is_fresh(trajectory, 7, max_lag_steps=2)


@pytest.mark.parametrize(("version", "is_taken"), [(5, True), (7, True), (8, False)])
def test_group_is_trained_at_max_lag_and_stale_after(version: int, is_taken: bool) -> None:
    table = make_table(per_step=1)
    fill(table, "a", version=5)
    groups, outcomes = take(table, version, max_lag_steps=2)
    assert ids(groups) == (["a"] if is_taken else [])
    assert said(outcomes) == (
        {} if is_taken else {f"a/{number}": ("stale", "lag") for number in range(3)}
    )


def test_stale_members_are_dropped_and_the_survivors_train() -> None:
    table = make_table(per_step=1)
    for number, version in enumerate((4, 1, 4)):
        table.add(member("a", number, version=version))
    groups, outcomes = take(table, 4, max_lag_steps=2)
    assert [t.member for t in groups[0].members] == [0, 2]
    assert said(outcomes) == {"a/1": ("stale", "lag")}


def test_group_with_too_few_fresh_members_is_stale() -> None:
    table = make_table(per_step=1)
    for number, version in enumerate((4, 1, 1)):
        table.add(member("a", number, version=version))
    groups, outcomes = take(table, 4, max_lag_steps=2)
    assert groups == []
    assert said(outcomes) == {
        "a/0": ("stale", "lag_of_group"),
        "a/1": ("stale", "lag"),
        "a/2": ("stale", "lag"),
    }
    assert held_by(table) == []


def test_fresh_groups_wait_when_too_few_for_a_batch() -> None:
    table = make_table(per_step=3)
    fill(table, "a", "b", version=5)
    fill(table, "old", version=0)
    assert table.is_batch_ready(5)
    groups, outcomes = take(table, 5)
    assert groups == []
    assert {o.episode_id for o in outcomes} == {"old/0", "old/1", "old/2"}
    fill(table, "c", version=5)
    assert ids(take(table, 5)[0]) == ["a", "b", "c"]


def test_every_trajectory_leaves_exactly_once() -> None:
    table = make_table(per_step=1)
    outcomes: list[EpisodeOutcome] = []
    for group_id, version in (("a", 0), ("b", 9)):
        for number in range(3):
            outcomes += table.add(member(group_id, number, version=version))[0]
    for number in range(3):
        outcomes += table.add(failure("c", number))[0]
    groups, stale = take(table, 9)
    left = [o.episode_id for o in outcomes + stale]
    left += [t.episode_id for group in groups for t in group.members]
    assert sorted(left) == [f"{group}/{number}" for group in "abc" for number in range(3)]
    assert held_by(table) == []


def test_lockstep_batch_waits_for_schedulers_decision() -> None:
    table = make_table(is_lockstep=True)
    fill(table, "e", "f")
    assert not table.is_batch_ready(0)
    table.decide(0, 0)
    assert not table.is_batch_ready(0), "its round is not over"
    table.decide(0, 2)
    assert ids(take(table)[0]) == ["e", "f"]
    fill(table, "g")
    table.decide(1, 2)
    assert not table.is_batch_ready(1), "the scheduler counts a group that is not here yet"


def test_wider_lag_bound_applies_to_its_horizon_only() -> None:
    table = make_table(per_step=1)
    fill(table, "a", version=0)
    bounds = {("toy", 4): 5}
    assert table.take(5, max_lag_steps=2, in_order=False, lag_bounds={("toy", 9): 5})[0] == []
    fill(table, "b", version=0)
    groups, outcomes = table.take(5, max_lag_steps=2, in_order=False, lag_bounds=bounds)
    assert (ids(groups), outcomes) == (["b"], [])
    fill(table, "c", version=0)
    assert table.take(6, max_lag_steps=2, in_order=False, lag_bounds=bounds)[0] == []


def test_groups_that_wait_for_members_are_named() -> None:
    table = make_table()
    table.add(member("a", 0))
    fill(table, "b")
    assert table.open_ids == ["a"]


def test_settled_group_is_not_trained_on() -> None:
    table = make_table(per_step=1)
    fill(table, "g0000001", "g0000002")
    table.close_below(2)
    groups, outcomes = take(table)
    assert (ids(groups), outcomes) == (["g0000002"], [])
