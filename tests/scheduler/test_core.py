"""The scheduler's laws, one by one, on a clock that the test moves."""

import json
import time

from common.config.run_config import published_version
from common.config.train import TrainMode
from common.weights.messages import WeightsJoin
from common.wire.messages import GroupArrived, LeaseRequest, Outcome, Rejected
from scheduler.components import build_components
from scheduler.core import SchedulerCore
from tests.configs import edited
from tests.scheduler.builders import CATALOGUE, Table, ids, make_config, train_ids
from tools.dashboard.run_view import RoleView, Status


def test_grant_keeps_group_with_one_actor() -> None:
    table = Table()
    table.hello("actor-0")
    table.hello("actor-1")
    assert ids(table.ask("actor-0", 3).leases) == ["g0000000/0", "g0000000/1", "g0000000/2"]
    assert train_ids(table.ask("actor-1", 4).leases) == {"g0000001"}
    assert ids(table.ask("actor-0", 2).leases)[0] == "g0000000/3"


def test_grant_splits_group_when_nothing_remains() -> None:
    table = Table(make_config(per_step=1, max_ahead_steps=0))
    table.hello("actor-0")
    table.hello("actor-1")
    table.ask("actor-0", 3)
    assert ids(table.ask("actor-1", 5).leases) == ["g0000000/3"]


def test_grant_gives_reason_for_limit() -> None:
    table = Table()  # 2 groups a step, 1 step ahead, 4 members
    table.hello("actor-0")
    grant = table.ask("actor-0", 100)
    assert len(grant.leases) == 16
    assert grant.reason == "gate: 4 groups are ahead of the learner"
    assert 0.05 <= grant.retry_after_s <= 0.2
    assert table.ask("actor-7", 1).reason == "actor-7 is not registered, a Hello is needed"


def test_lease_horizon_is_the_stage_bounded_by_the_subset() -> None:
    table = Table(make_config(per_step=8))
    table.core.run.version = 2  # step 3: second stage, 10 turns; "easy" allows 8
    table.hello("actor-0", version=2)
    leases = table.ask("actor-0", 64, version=2).leases
    horizons = {lease.item_id.partition("-")[0]: lease.horizon for lease in leases}
    assert horizons == {"easy": 8, "hard": 10}
    assert {lease.horizon_stage for lease in leases} == {1}


def test_members_of_a_group_differ_in_their_seed_only() -> None:
    table = Table()
    table.hello("actor-0")
    leases = table.ask("actor-0", 4).leases
    stamps = {(x.group_id, x.env, x.item_id, x.horizon, x.opened_at_version) for x in leases}
    assert len(stamps) == 1
    assert len({lease.seed for lease in leases}) == 4


def test_filtered_group_is_replaced_and_a_ready_one_counts() -> None:
    table = Table(make_config(per_step=2, max_ahead_steps=0))
    table.hello("actor-0")
    leases = table.ask("actor-0", 8).leases
    table.arrive(leases)
    table.report(groups=[GroupArrived(group_id="g0000000", is_ready=True)])
    table.finish_group("g0000001", Outcome.FILTERED)
    assert train_ids(table.ask("actor-0", 99).leases) == {"g0000002"}


def test_sync_batch_waits_for_the_step_and_the_engine() -> None:
    table = Table(make_config(mode=TrainMode.SYNC, per_step=2))
    table.hello("actor-0")
    leases = table.ask("actor-0", 99).leases
    assert train_ids(leases) == {"g0000000", "g0000001"}
    assert table.ask("actor-0", 1).reason == "sync: 2 groups are open"
    table.arrive(leases)
    table.report(groups=[GroupArrived(group_id=g, is_ready=True) for g in train_ids(leases)])
    assert table.ask("actor-0", 1).leases == []
    for group_id in sorted(train_ids(leases)):
        table.finish_group(group_id, Outcome.TRAINED)
    table.step(1)
    assert "has version 0, version 1 is needed" in table.ask("actor-0", 99, version=0).reason
    second = table.ask("actor-0", 99, version=1).leases
    assert {lease.opened_at_version for lease in second} == {1}
    assert len(second) == 8


def test_sync_batch_replaces_exactly_the_filtered_groups() -> None:
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


def test_step_without_signal_stops_its_refill() -> None:
    cfg = make_config(mode=TrainMode.SYNC, per_step=2, max_oversample=2.0)  # 4 groups a step
    table = Table(cfg)
    table.hello("actor-0")
    table.ask("actor-0", 99)
    table.report(groups=[GroupArrived(group_id="g0000000", is_ready=True)])
    for number in (1, 2, 3):
        table.finish_group(f"g000000{number}", Outcome.FILTERED)
        grant = table.ask("actor-0", 99)
    assert grant.leases == []
    assert grant.reason == "gate: no more groups for this step, 3 had no signal"
    table.finish_group("g0000000", Outcome.TRAINED)
    table.step(1)
    assert len(train_ids(table.ask("actor-0", 99, version=1).leases)) == 2


def test_status_holds_fields_of_display() -> None:
    table = Table()
    assert Status.model_validate_json(json.dumps(table.core.status())).learner == RoleView()
    table.hello("actor-0")
    table.hello("learner")
    table.arrive(table.ask("actor-0", 4).leases)
    status = Status.model_validate_json(json.dumps(table.core.status()))
    assert (status.phase, status.version, status.horizon) == ("train", 0, 5)
    assert (status.num_open, status.num_total) == (1, 0)
    assert status.ledger["in_flight"] == 4
    assert status.actors[0].name == "actor-0"
    assert status.learner.last_seen_s == 0.0
    assert set(status.success.values()) == {1.0}


def test_heartbeats_without_news_share_one_answer() -> None:
    table = Table()
    for name in ("actor-0", "actor-1"):
        table.hello(name)
    (lease,) = table.ask("actor-0", 1).leases
    answer = table.beat("actor-0", [lease.episode_id])
    assert (answer.revoked, answer.is_finished) == ([], False)
    assert table.beat("actor-1", []) is answer
    assert table.beat("actor-1", [lease.episode_id]).revoked == [lease.episode_id]


def test_foreign_message_is_rejected() -> None:
    join = WeightsJoin(actor="a", incarnation="i", devices=[""], version=0)
    assert isinstance(Table().core.handle("actor-0", join), Rejected)


def test_scheduler_serves_five_thousand_leases_a_second() -> None:
    cfg = make_config(per_step=64, size=8, max_ahead_steps=1, num_steps=1_000)
    core = SchedulerCore(build_components(cfg, CATALOGUE), clock=time.monotonic)
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


def test_sync_engine_with_the_held_back_version_gets_work() -> None:
    cfg = make_config(per_step=1)
    cfg = edited(
        cfg, {"train.mode": TrainMode.SYNC, "train.num_steps": 10, "learner.hold_back_steps": 2}
    )
    table = Table(cfg)
    table.core.run.version = 5
    table.hello("actor-0", version=2)
    assert table.ask("actor-0", 4, version=2).reason == (
        "weights: the actor has version 2, version 3 is needed"
    )
    assert len(table.ask("actor-0", 4, version=3).leases) == 4


def test_published_version_is_held_back_until_the_last_step() -> None:
    cfg = make_config()
    cfg = edited(cfg, {"train.num_steps": 10, "learner.hold_back_steps": 4})
    assert [published_version(cfg, version) for version in (0, 4, 5, 9, 10)] == [0, 0, 1, 5, 10]
