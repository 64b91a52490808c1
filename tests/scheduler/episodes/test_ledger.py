"""Every issued episode has exactly one outcome, independent of the first reporter."""

from dataclasses import replace

import pytest

from common.errors import EpisodesFailed, LedgerError, LongstrideError
from common.wire.messages import EndReason, GroupArrived, Outcome
from scheduler.core import TICK_S
from scheduler.episodes.ledger import BURST_S, MIN_ALL, OUTAGE_S
from scheduler.evaluation import Phase
from tests.scheduler.builders import Table, ids, joined, make_config, outcome_of, seen_of


def test_episode_fails_with_its_cause_after_max_attempts() -> None:
    table = Table(make_config(max_attempts=2))
    for incarnation in ("a", "b", "c"):
        table.hello("actor-0", incarnation=incarnation)
        table.ask("actor-0", 1)
    counts = table.counts()
    assert (counts["failed"], counts["causes"]) == (1, {"failed:actor_restarted": 1})
    assert counts["lost"] == 0


def test_abandoned_episodes_are_reported_until_their_group_closes() -> None:
    table = joined("learner", "actor-0", cfg=make_config(max_attempts=1))
    leases = table.ask("actor-0", 4).leases
    table.arrive(leases[1:])
    table.hello("actor-0", incarnation="new")
    assert table.beat("learner", []).revoked == ["g0000000/0"]
    assert table.beat("learner", []).revoked == ["g0000000/0"]
    table.report(groups=[GroupArrived(group_id="g0000000", is_ready=True)])
    assert table.beat("learner", []).revoked == ["g0000000/0"]
    table.report(outcomes=[outcome_of(x.episode_id, Outcome.TRAINED) for x in leases[1:]])
    assert table.beat("learner", []).revoked == []


def test_restarted_learner_receives_abandoned_members_of_ready_groups() -> None:
    table = joined("learner-1", "actor-0", cfg=make_config(max_attempts=1))
    leases = table.ask("actor-0", 4).leases
    table.arrive(leases[1:])
    table.hello("actor-0", incarnation="new")
    table.report(groups=[GroupArrived(group_id="g0000000", is_ready=True)])
    table.hello("learner-2", incarnation="i1")
    assert table.beat("learner-2", []).revoked == ["g0000000/0"]


def test_learners_outcome_replaces_the_schedulers() -> None:
    table = joined(cfg=make_config(max_attempts=1))
    leases = table.ask("actor-0", 4).leases
    table.hello("actor-0", incarnation="new")  # all four given up
    assert table.counts()["failed"] == 4
    table.finish_group("g0000000", Outcome.TRAINED)
    table.report(outcomes=[outcome_of(x.episode_id, Outcome.TRAINED) for x in leases])
    counts = table.counts()
    assert (counts["failed"], counts["trained"], counts["lost"]) == (0, 4, 0)
    assert counts["causes"] == {}


def test_late_arrival_of_an_earlier_attempt_is_accepted() -> None:
    table = joined()
    first = table.ask("actor-0", 1).leases
    table.hello("actor-0", incarnation="new")
    second = table.ask("actor-0", 1).leases
    table.arrive(first)
    assert len(table.core.lifecycle.leases) == 0
    assert table.beat("actor-0", ids(second)).revoked == ids(second)
    table.report(outcomes=[outcome_of(first[0].episode_id, Outcome.TRAINED)])
    assert table.counts()["trained"] == 1


def test_repeated_outcome_is_ignored_and_a_conflict_refused() -> None:
    table = joined()
    leases = table.ask("actor-0", 4).leases
    table.arrive(leases)
    table.finish_group("g0000000", Outcome.TRAINED)
    trained = [outcome_of(x.episode_id, Outcome.TRAINED) for x in leases]
    table.report(seen=[seen_of(x) for x in leases], outcomes=trained)
    assert table.counts()["trained"] == 4
    table.report(outcomes=[outcome_of(leases[0].episode_id, Outcome.STALE)])
    assert table.counts()["trained"] == 4
    assert table.core.lifecycle.ledger.num_unknown == 1
    table.core.lifecycle.assert_balanced()


def test_report_of_unissued_episode_is_counted() -> None:
    table = Table()
    table.report(outcomes=[outcome_of("g0000099/0", Outcome.TRAINED)])
    assert table.counts()["unknown_reports"] == 1


def test_too_many_single_failures_end_run() -> None:
    table = joined(cfg=make_config(per_step=50, max_failed_frac=0.2))
    leases = table.ask("actor-0", 60).leases
    table.arrive(leases[:39])
    for number, lease in enumerate(leases[39:50]):
        reason = EndReason.ENV_ERROR if number < 10 else EndReason.ABORTED
        table.clock.now += BURST_S
        table.arrive([lease], end_reason=reason)
    with pytest.raises(LongstrideError, match=r"11 of the last 50 .*'env_error': 10, 'aborted': 1"):
        table.core.tick()


def _play_outage(table: Table) -> None:
    """118 of 260 episodes fail within a second."""
    leases = table.ask("actor-0", 260).leases
    table.arrive(leases[:60])
    for first in range(60, 178, 10):
        table.clock.now += 0.1
        table.arrive(leases[first : min(178, first + 10)], end_reason=EndReason.ENV_ERROR)
    table.arrive(leases[178:])


def test_outage_of_most_episodes_counts_once() -> None:
    table = joined(cfg=make_config(per_step=80, max_ahead_steps=1, max_failed_frac=0.2))
    _play_outage(table)
    assert table.core.tick()
    failures = table.core.lifecycle.failures
    assert (failures.causes.count("env_error"), len(failures.causes)) == (1, 143)


def test_lasting_outage_ends_run_with_counts() -> None:
    table = joined(cfg=make_config(per_step=80, max_ahead_steps=1, max_failed_frac=0.2))
    leases = table.ask("actor-0", 260).leases
    for number, lease in enumerate(leases):
        table.clock.now += 1.0
        table.arrive([lease], end_reason=EndReason.DONE if number % 3 else EndReason.ENV_ERROR)
        if number < OUTAGE_S:
            table.core.tick()
    with pytest.raises(
        LongstrideError, match=r"87 of 260 episodes in an outage of 258 s .*'env_error': 87"
    ):
        table.core.tick()


MISTAKE = "dataset: reward score failed on record 3 of q.jsonl: returned {}, which is not a number"


def _fail_one(table: Table, error: str, *, reason: EndReason = EndReason.ENV_ERROR) -> None:
    """Grant an episode and let it fail in the same second."""
    (lease,) = table.ask("actor-0", 1).leases
    table.clock.now += 0.1
    table.report(seen=[replace(seen_of(lease, end_reason=reason), error=error)])


def test_failures_in_a_row_end_run_with_their_error() -> None:
    table = joined(cfg=make_config(per_step=50, max_failed_frac=0.2))
    for _ in range(MIN_ALL - 1):
        _fail_one(table, MISTAKE)
    assert table.core.tick()
    table.clock.now += TICK_S
    _fail_one(table, MISTAKE)
    with pytest.raises(EpisodesFailed, match=r"16 of the last 16 .* error: dataset: reward score"):
        table.core.tick()


def test_refused_episodes_end_run_with_their_reason() -> None:
    table = joined(cfg=make_config(per_step=50, max_failed_frac=0.2))
    for _ in range(MIN_ALL):
        (lease,) = table.ask("actor-0", 1).leases
        table.clock.now += 0.1
        refused = outcome_of(lease.episode_id, Outcome.FAILED, "refused")
        table.report(outcomes=[replace(refused, error="no token was sampled: the prompt is long")])
    with pytest.raises(EpisodesFailed, match="refused an episode: no token was sampled"):
        table.core.tick()


def test_failed_rewards_of_groups_end_run_with_their_error() -> None:
    table = joined(cfg=make_config(per_step=50, max_failed_frac=0.9))
    error = "groups.reward.rank=mine.py:rank failed on item a-train-0: KeyError: 'unit'"
    for _ in range(1 + MIN_ALL // 4):  # Members of the first group count as one outage.
        leases = table.ask("actor-0", 4).leases
        table.clock.now += 0.1
        table.arrive(leases)
        failed = [outcome_of(each.episode_id, Outcome.FAILED, "group_reward") for each in leases]
        table.report(outcomes=[replace(each, error=error) for each in failed])
    with pytest.raises(EpisodesFailed, match=r"17 of the last 17 .* error: groups.reward.rank="):
        table.core.tick()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("POST /v1/sessions: ClientConnectorError: Connection refused", EndReason.ENV_ERROR),
        ("no answer within 30 s", EndReason.ENV_TIMEOUT),
    ],
)
def test_errors_that_pass_may_last_as_long_as_an_outage(error: str, reason: EndReason) -> None:
    table = joined(cfg=make_config(per_step=50, max_failed_frac=0.2))
    for _ in range(60):
        _fail_one(table, error, reason=reason)
    assert table.core.tick()
    for _ in range(60):
        table.clock.now += 2.0
        _fail_one(table, error, reason=reason)
    with pytest.raises(EpisodesFailed, match=r"120 of 120 episodes in an outage"):
        table.core.tick()


def test_first_error_of_each_kind_is_logged_at_once(caplog: pytest.LogCaptureFixture) -> None:
    table = joined(cfg=make_config(per_step=50))
    for number in range(10):
        _fail_one(table, f"reward failed on record {number}")
    _fail_one(table, "the hub refused\nthe token")
    logged = [each.message for each in caplog.records if "episodes fail" in each.message]
    assert logged == [
        "episodes fail cause=env_error error=reward failed on record 0",
        "episodes fail num=10 cause=env_error error=reward failed on record 0",
        "episodes fail cause=env_error error=the hub refused the token",
    ]
    kinds = table.core.status()["failures"]
    assert [(each["error"], each["num"]) for each in kinds] == [
        ("reward failed on record 0", 10),
        ("the hub refused the token", 1),
    ]


def test_unbalanced_ledger_raises_with_the_difference() -> None:
    table = joined()
    table.ask("actor-0", 4)
    table.core.lifecycle.ledger.train.issued += 3
    with pytest.raises(LedgerError, match="difference 3"):
        table.step(1)


def test_last_step_ends_training_and_unplayed_episodes_are_stale() -> None:
    table = joined(cfg=make_config(num_steps=1))
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


def test_restarted_learner_receives_missing_members_of_closed_groups() -> None:
    table = joined("learner-1", "actor-0", cfg=make_config(max_attempts=1))
    leases = table.ask("actor-0", 4).leases
    table.arrive(leases[1:])
    table.hello("actor-0", incarnation="new")  # the first is given up
    table.finish_group("g0000000", Outcome.FILTERED)
    assert table.beat("learner-1", []).revoked == []
    table.hello("learner-2", incarnation="i1")  # It has the journal but not the abandoned members.
    assert table.beat("learner-2", ["g0000000"]).revoked == ["g0000000/0"]
    assert table.beat("learner-2", ["g0000099"]).revoked == []  # never opened


@pytest.mark.parametrize("before", [Outcome.STALE, Outcome.FAILED, Outcome.FILTERED])
def test_restarted_learner_may_train_untrained_episodes(before: Outcome) -> None:
    """It finds members in its journal that came too late for its predecessor."""
    table = joined()
    leases = table.ask("actor-0", 4).leases
    table.arrive(leases)
    table.report(groups=[GroupArrived(group_id="g0000000", is_ready=before is Outcome.STALE)])
    table.report(outcomes=[outcome_of(x.episode_id, before, "cause") for x in leases])
    table.report(outcomes=[outcome_of(x.episode_id, Outcome.TRAINED) for x in leases])
    counts = table.counts()
    assert (counts["trained"], counts[before.value], counts["causes"]) == (4, 0, {})
    assert table.core.lifecycle.audit.total() == {"trained": 4}


def test_ledger_error_names_account_and_counts() -> None:
    table = joined()
    table.arrive(table.ask("actor-0", 4).leases)
    table.finish_group("g0000000", Outcome.TRAINED)
    table.core.lifecycle.ledger.train.settled["trained"] -= 1
    law = r"train ledger: issued 4 != settled {'trained': 3,.*} \+ in flight 0; difference 1"
    with pytest.raises(LedgerError, match=law):
        table.step(1)
