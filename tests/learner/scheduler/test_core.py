"""The scheduler's laws, one by one, on a clock that the test moves."""

import json
import time

import pytest

from common.config import TrainMode
from common.errors import ConfigError, LedgerError, LongstrideError
from common.messages import (
    EndReason,
    GroupArrived,
    LeaseRequest,
    Outcome,
    Rejected,
    Snapshot,
    SnapshotRequest,
    StatusRequest,
    WeightsJoin,
)
from learner.scheduler.core import SchedulerCore
from learner.scheduler.evaluation import Phase
from tests.learner.scheduler.builders import (
    CATALOGUE,
    Table,
    ids,
    make_config,
    outcome_of,
    seen_of,
    train_ids,
)


def test_grant_keeps_the_members_of_a_group_together_with_one_actor() -> None:
    table = Table()
    table.hello("actor-0")
    table.hello("actor-1")
    assert ids(table.ask("actor-0", 3).leases) == ["g0000000/0", "g0000000/1", "g0000000/2"]
    assert train_ids(table.ask("actor-1", 4).leases) == {"g0000001"}
    assert ids(table.ask("actor-0", 2).leases)[0] == "g0000000/3"


def test_grant_gives_the_rest_of_a_group_away_when_nothing_else_is_left() -> None:
    table = Table(make_config(per_step=1, max_ahead_steps=0))
    table.hello("actor-0")
    table.hello("actor-1")
    table.ask("actor-0", 3)
    assert ids(table.ask("actor-1", 5).leases) == ["g0000000/3"]


def test_grant_says_why_there_is_no_more() -> None:
    table = Table()  # 2 groups a step, 1 step ahead, 4 members
    table.hello("actor-0")
    grant = table.ask("actor-0", 100)
    assert len(grant.leases) == 16
    assert grant.reason == "gate: 4 groups ahead of the learner"
    assert 0.05 <= grant.retry_after_s <= 0.2
    assert table.ask("actor-7", 1).reason == "actor-7 is not known, say hello"


def test_horizon_of_a_lease_is_the_stage_bounded_by_the_subset() -> None:
    table = Table(make_config(per_step=8))
    table.core.version = 2  # step 3: second stage, 10 turns; "easy" allows 8
    table.hello("actor-0", version=2)
    leases = table.ask("actor-0", 64, version=2).leases
    horizons = {lease.item_id.partition("-")[0]: lease.horizon for lease in leases}
    assert horizons == {"easy": 8, "hard": 10}
    assert {lease.horizon_stage for lease in leases} == {1}


def test_members_of_a_group_share_everything_but_their_seed() -> None:
    table = Table()
    table.hello("actor-0")
    leases = table.ask("actor-0", 4).leases
    stamps = {(x.group_id, x.env, x.item_id, x.horizon, x.opened_at_version) for x in leases}
    assert len(stamps) == 1
    assert len({lease.seed for lease in leases}) == 4


def test_lease_of_a_dead_actor_is_issued_again_with_the_next_attempt() -> None:
    table = Table()
    table.hello("actor-0")
    first = table.ask("actor-0", 4).leases
    table.clock.now += 11
    table.hello("actor-1")
    table.core.tick()
    second = table.ask("actor-1", 4).leases
    assert ids(second) == ids(first)
    assert {lease.attempt for lease in second} == {1}
    assert table.counts()["reissued"] == 4


def test_rest_of_a_dead_actor_s_group_goes_to_the_next_one_that_asks() -> None:
    table = Table()
    table.hello("actor-0")
    leases = table.ask("actor-0", 2).leases
    table.arrive(leases)
    table.clock.now += 11
    table.hello("actor-1")
    table.core.tick()
    assert ids(table.ask("actor-1", 2).leases) == ["g0000000/2", "g0000000/3"]


def test_lease_of_a_restarted_actor_is_issued_again_at_once() -> None:
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


def test_hello_of_the_same_process_keeps_its_leases() -> None:
    table = Table()
    table.hello("actor-0")
    first = table.ask("actor-0", 4).leases
    table.hello("actor-0")
    assert set(ids(table.ask("actor-0", 4).leases)).isdisjoint(ids(first))


def test_episode_is_failed_with_its_cause_after_max_attempts() -> None:
    table = Table(make_config(max_attempts=2))
    for incarnation in ("a", "b", "c"):
        table.hello("actor-0", incarnation=incarnation)
        table.ask("actor-0", 1)
    counts = table.counts()
    assert (counts["failed"], counts["causes"]) == (1, {"failed:actor_restarted": 1})
    assert counts["lost"] == 0


def test_learner_is_told_of_episodes_given_up_until_the_group_is_closed() -> None:
    table = Table(make_config(max_attempts=1))
    table.hello("learner")
    table.hello("actor-0")
    leases = table.ask("actor-0", 4).leases
    table.arrive(leases[1:])
    table.hello("actor-0", incarnation="new")
    assert table.beat("learner", []).revoked == ["g0000000/0"]
    assert table.beat("learner", []).revoked == ["g0000000/0"]
    table.report(groups=[GroupArrived(group_id="g0000000", is_ready=True)])
    assert table.beat("learner", []).revoked == ["g0000000/0"]
    table.report(outcomes=[outcome_of(x.episode_id, Outcome.TRAINED) for x in leases[1:]])
    assert table.beat("learner", []).revoked == []


def test_learner_that_restarts_is_told_who_was_given_up_in_a_group_called_ready() -> None:
    table = Table(make_config(max_attempts=1))
    table.hello("learner-1")
    table.hello("actor-0")
    leases = table.ask("actor-0", 4).leases
    table.arrive(leases[1:])
    table.hello("actor-0", incarnation="new")
    table.report(groups=[GroupArrived(group_id="g0000000", is_ready=True)])
    table.hello("learner-2", incarnation="i1")
    assert table.beat("learner-2", []).revoked == ["g0000000/0"]


def test_learner_s_word_replaces_that_of_the_scheduler() -> None:
    table = Table(make_config(max_attempts=1))
    table.hello("actor-0")
    leases = table.ask("actor-0", 4).leases
    table.hello("actor-0", incarnation="new")  # all four given up
    assert table.counts()["failed"] == 4
    table.finish_group("g0000000", Outcome.TRAINED)
    table.report(outcomes=[outcome_of(x.episode_id, Outcome.TRAINED) for x in leases])
    counts = table.counts()
    assert (counts["failed"], counts["trained"], counts["lost"]) == (0, 4, 0)
    assert counts["causes"] == {}


def test_heartbeat_renews_what_it_lists() -> None:
    table = Table()
    table.hello("actor-0")
    leases = table.ask("actor-0", 4).leases
    for _ in range(500):  # 2500 s, beyond the 1810 s of a lease
        table.clock.now += 5
        assert table.beat("actor-0", ids(leases)).revoked == []
        table.core.tick()
    assert table.counts()["reissued"] == 0
    assert table.core.books.leases.num_leased == 4


def test_lease_past_its_deadline_is_issued_again() -> None:
    table = Table()
    table.hello("actor-0")
    first = table.ask("actor-0", 1).leases
    episode = table.core.books.leases.leased_to("actor-0")[0]
    assert episode.deadline == table.clock.now + 1800 + 10
    table.clock.now = episode.deadline + 1
    table.hello("actor-0")
    table.core.tick()
    assert ids(table.ask("actor-0", 1).leases) == ids(first)


def test_lease_that_two_heartbeats_do_not_list_is_lost() -> None:
    table = Table()
    table.hello("actor-0")
    leases = table.ask("actor-0", 2).leases
    kept, missed = leases
    table.clock.now += 6
    table.beat("actor-0", [kept.episode_id])
    assert table.core.books.leases.num_leased == 2
    table.beat("actor-0", [kept.episode_id])
    assert ids(table.ask("actor-0", 1).leases) == [missed.episode_id]


def test_missed_lease_is_not_lost_when_the_next_heartbeat_lists_it() -> None:
    table = Table()
    table.hello("actor-0")
    leases = table.ask("actor-0", 1).leases
    for running in ([], ids(leases), [], ids(leases)):
        table.clock.now += 6
        table.beat("actor-0", running)
    assert table.core.books.leases.num_leased == 1


def test_actor_that_was_thought_dead_takes_its_episodes_back() -> None:
    table = Table()
    table.hello("actor-0")
    leases = table.ask("actor-0", 2).leases
    table.clock.now += 11
    table.core.tick()
    assert table.core.books.leases.num_leased == 0
    assert table.beat("actor-0", ids(leases)).revoked == []
    assert table.core.books.leases.num_leased == 2
    assert table.counts()["reissued"] == 0


def test_actor_is_told_to_abandon_what_another_one_plays_now() -> None:
    table = Table()
    table.hello("actor-0")
    leases = table.ask("actor-0", 2).leases
    table.clock.now += 11
    table.hello("actor-1")
    table.core.tick()
    table.ask("actor-1", 2)
    assert table.beat("actor-0", ids(leases)).revoked == ids(leases)
    assert table.beat("actor-0", ["g0099999/0", "nonsense"]).revoked == ["g0099999/0", "nonsense"]


def test_late_arrival_of_an_earlier_attempt_is_accepted() -> None:
    table = Table()
    table.hello("actor-0")
    first = table.ask("actor-0", 1).leases
    table.hello("actor-0", incarnation="new")
    second = table.ask("actor-0", 1).leases
    table.arrive(first)
    assert table.core.books.leases.num_leased == 0
    assert table.beat("actor-0", ids(second)).revoked == ids(second)
    table.report(outcomes=[outcome_of(first[0].episode_id, Outcome.TRAINED)])
    assert table.counts()["trained"] == 1


def test_repeated_outcome_is_ignored_and_another_one_is_an_error() -> None:
    table = Table()
    table.hello("actor-0")
    leases = table.ask("actor-0", 4).leases
    table.arrive(leases)
    table.finish_group("g0000000", Outcome.TRAINED)
    trained = [outcome_of(x.episode_id, Outcome.TRAINED) for x in leases]
    table.report(seen=[seen_of(x) for x in leases], outcomes=trained)
    assert table.counts()["trained"] == 4
    with pytest.raises(LedgerError, match="g0000000/0 was trained"):
        table.report(outcomes=[outcome_of(leases[0].episode_id, Outcome.STALE)])


def test_report_of_an_episode_that_was_never_issued_is_counted_not_fatal() -> None:
    table = Table()
    table.report(outcomes=[outcome_of("g0000099/0", Outcome.TRAINED)])
    assert table.counts()["unknown_reports"] == 1


def test_filtered_group_is_filled_up_and_a_ready_one_holds_its_place() -> None:
    table = Table(make_config(per_step=2, max_ahead_steps=0))
    table.hello("actor-0")
    leases = table.ask("actor-0", 8).leases
    table.arrive(leases)
    table.report(groups=[GroupArrived(group_id="g0000000", is_ready=True)])
    table.finish_group("g0000001", Outcome.FILTERED)
    assert train_ids(table.ask("actor-0", 99).leases) == {"g0000002"}


def test_sync_batch_waits_for_the_step_and_for_the_engine_of_the_actor() -> None:
    table = Table(make_config(mode=TrainMode.SYNC, per_step=2))
    assert table.hello("actor-0").is_lockstep
    leases = table.ask("actor-0", 99).leases
    assert train_ids(leases) == {"g0000000", "g0000001"}
    assert table.ask("actor-0", 1).reason == "sync: 2 groups are open"
    table.arrive(leases)
    table.report(groups=[GroupArrived(group_id=g, is_ready=True) for g in train_ids(leases)])
    assert table.ask("actor-0", 1).leases == []
    for group_id in sorted(train_ids(leases)):
        table.finish_group(group_id, Outcome.TRAINED)
    table.step(1)
    assert "holds version 0, 1 is needed" in table.ask("actor-0", 99, version=0).reason
    second = table.ask("actor-0", 99, version=1).leases
    assert {lease.opened_at_version for lease in second} == {1}
    assert len(second) == 8


def test_sync_batch_opens_exactly_what_filtering_took_at_the_same_version() -> None:
    table = Table(make_config(mode=TrainMode.SYNC, per_step=3))
    table.hello("actor-0")
    table.arrive(table.ask("actor-0", 99).leases)
    table.report(groups=[GroupArrived(group_id="g0000000", is_ready=True)])
    table.finish_group("g0000001", Outcome.FILTERED)
    assert table.ask("actor-0", 99).leases == []  # g2 is still open
    table.finish_group("g0000002", Outcome.FILTERED)
    again = table.ask("actor-0", 99).leases
    assert train_ids(again) == {"g0000003", "g0000004"}
    assert {lease.opened_at_version for lease in again} == {0}


def test_step_is_not_refilled_for_ever_when_groups_carry_no_signal() -> None:
    cfg = make_config(mode=TrainMode.SYNC, per_step=2, max_oversample=2.0)  # 4 groups a step
    table = Table(cfg)
    table.hello("actor-0")
    table.ask("actor-0", 99)
    table.report(groups=[GroupArrived(group_id="g0000000", is_ready=True)])
    for number in (1, 2, 3):
        table.finish_group(f"g000000{number}", Outcome.FILTERED)
        grant = table.ask("actor-0", 99)
    assert grant.leases == []
    assert grant.reason == "gate: 3 groups of this step carried no signal, no more drawn"
    table.finish_group("g0000000", Outcome.TRAINED)
    table.step(1)
    assert len(train_ids(table.ask("actor-0", 99, version=1).leases)) == 2


def test_run_ends_with_the_counts_when_too_many_episodes_fail() -> None:
    table = Table(make_config(per_step=50, max_failed_frac=0.2))
    table.hello("actor-0")
    leases = table.ask("actor-0", 60).leases
    table.arrive(leases[:39])
    table.arrive(leases[39:49], end_reason=EndReason.ENV_ERROR)
    with pytest.raises(LongstrideError, match=r"11 of the last 50 .*'env_error': 10, 'aborted': 1"):
        table.arrive(leases[49:50], end_reason=EndReason.ABORTED)


def test_status_tells_what_a_display_needs() -> None:
    table = Table()
    table.hello("actor-0")
    table.hello("learner")
    table.arrive(table.ask("actor-0", 4).leases)
    status = json.loads(table.core.handle("x", StatusRequest(name="x")).state)
    assert (status["phase"], status["version"], status["horizon"]) == ("train", 0, 5)
    assert status["groups"]["open"] == 1
    assert status["ledger"]["in_flight"] == 4
    assert status["actors"][0]["name"] == "actor-0"
    assert status["learner"]["last_seen_s"] == 0.0
    assert set(status["success"].values()) == {1.0}


def test_message_that_is_not_for_the_scheduler_is_rejected() -> None:
    join = WeightsJoin(actor="a", incarnation="i", device="cpu", version=0)
    assert isinstance(Table().core.handle("actor-0", join), Rejected)


def test_restored_state_is_the_same_state_and_live_actors_keep_their_leases() -> None:
    table = Table()
    table.hello("actor-0")
    leases = table.ask("actor-0", 6).leases
    table.arrive(leases[:2])
    state = json.loads(json.dumps(table.core.snapshot()))
    other = Table(clock=table.clock)
    other.clock.now += 5_000
    other.core.restore(state)
    assert other.core.snapshot() == state
    other.core.tick()
    assert other.beat("actor-0", ids(leases[2:])).revoked == []
    assert other.core.books.leases.num_leased == 4
    assert ids(other.ask("actor-0", 2).leases) == ["g0000001/2", "g0000001/3"]


def test_restored_lease_is_issued_again_when_its_actor_does_not_come_back() -> None:
    table = Table()
    table.hello("actor-0")
    leases = table.ask("actor-0", 4).leases
    other = Table(clock=table.clock)
    other.core.restore(table.core.snapshot())
    other.clock.now += 11
    other.hello("actor-1")
    other.core.tick()
    assert ids(other.ask("actor-1", 4).leases) == ids(leases)


def test_state_of_another_seed_is_refused() -> None:
    table = Table()
    state = table.core.snapshot() | {"seed": 7}
    with pytest.raises(ConfigError, match="seed=7, not 0"):
        table.core.restore(state)


def test_rollback_restores_the_checkpoint_and_never_uses_an_id_twice() -> None:
    table = Table()
    table.hello("actor-0")
    before = table.ask("actor-0", 4).leases
    snapshot = table.core.handle("learner", SnapshotRequest(version=0))
    after = table.ask("actor-0", 4).leases
    table.step(1)
    table.core.handle("learner", Snapshot(version=0, state=snapshot.state))
    assert table.core.version == 0
    assert table.beat("actor-0", ids(before) + ids(after)).revoked == ids(after)
    again = table.ask("actor-0", 4).leases
    assert ids(again)[0] == "g0000001.1/0"
    assert [x.item_id for x in again] == [x.item_id for x in after]


def test_rollback_issues_leases_of_restarted_actors_again() -> None:
    table = Table()
    table.hello("actor-0", incarnation="old")
    leases = table.ask("actor-0", 4).leases
    snapshot = table.core.handle("learner", SnapshotRequest(version=0))
    table.hello("actor-0", incarnation="new")
    table.core.handle("learner", Snapshot(version=0, state=snapshot.state))
    assert ids(table.ask("actor-0", 4).leases) == ids(leases)


def test_step_that_leaves_the_books_unbalanced_raises_with_the_difference() -> None:
    table = Table()
    table.hello("actor-0")
    table.ask("actor-0", 4)
    table.core.books.ledger.train.issued += 3
    with pytest.raises(LedgerError, match="difference 3"):
        table.step(1)


def test_training_ends_with_the_last_step_and_what_was_not_played_is_stale() -> None:
    table = Table(make_config(num_steps=1))
    table.hello("actor-0")
    leases = table.ask("actor-0", 8).leases
    table.arrive(leases[:4])
    table.finish_group("g0000000", Outcome.TRAINED)
    table.step(1, is_last=True)
    assert table.core.phase is Phase.DONE
    assert table.beat("actor-0", ids(leases[4:])).is_finished
    assert table.ask("actor-0", 1, version=1).reason == "finished"
    counts = table.counts()
    assert (counts["trained"], counts["stale"], counts["in_flight"]) == (4, 4, 0)
    assert counts["causes"] == {"stale:run_ended": 4}


def test_scheduler_serves_five_thousand_leases_a_second() -> None:
    cfg = make_config(per_step=64, size=8, max_ahead_steps=1, num_steps=1_000)
    core = SchedulerCore(cfg, CATALOGUE, clock=time.monotonic)
    table = Table(cfg)
    table.core = core
    table.hello("actor-0")
    num = 0
    started = time.process_time()
    for version in range(1, 5):
        leases = []
        while grant := core.handle(
            "actor-0", LeaseRequest(actor="actor-0", num_free_slots=8, version=version)
        ).leases:
            leases += grant
        table.beat("actor-0", ids(leases), version=version)
        table.arrive(leases)
        for group_id in train_ids(leases):
            table.finish_group(group_id, Outcome.TRAINED)
        table.step(version)
        num += len(leases)
    assert num == 4 * 2 * 64 * 8
    assert num / (time.process_time() - started) > 5_000
