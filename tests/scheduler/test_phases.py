"""The phases around training."""

import pytest

from common.config.eval import EvalSection
from common.wire.messages import EndReason, EpisodeKind, Lease, PolicyKind
from scheduler.evaluation import Phase
from tests.configs import edited
from tests.scheduler.builders import Table, ids, make_config


def _table(*, before: bool = True, after: bool = True, baselines: bool = False) -> Table:
    evaluation = EvalSection(num_items=4, before=before, after=after, baselines=baselines)
    table = Table(make_config(num_steps=1, evaluation=evaluation))
    table.hello("actor-0")
    return table


def _all(table: Table, version: int = 0) -> list[Lease]:
    return table.ask("actor-0", 100, version=version).leases


def test_first_evaluation_plays_every_item_with_every_policy() -> None:
    table = _table(baselines=True)
    leases = _all(table)
    assert {lease.kind for lease in leases} == {EpisodeKind.EVAL}
    by_policy = {policy: [x for x in leases if x.policy is policy] for policy in PolicyKind}
    items = [["easy-test-0", "easy-test-1", "hard-test-0", "hard-test-1"]] * 3
    assert [[x.item_id for x in each] for each in by_policy.values()] == items
    assert ids(by_policy[PolicyKind.MODEL])[0] == "eval-before-model/0"
    assert ids(by_policy[PolicyKind.RANDOM_VALID])[3] == "eval-before-random_valid/3"
    assert ids(by_policy[PolicyKind.EXPERT])[0] == "eval-before-expert/0"


def test_evaluation_uses_full_horizon_of_subset() -> None:
    leases = _all(_table())  # the first training stage has 5 turns
    assert [lease.horizon for lease in leases] == [8, 8, 30, 30]


def test_phase_ends_when_every_evaluation_episode_has_arrived() -> None:
    table = _table()
    leases = _all(table)
    table.arrive(leases[:-1])
    assert _all(table) == []
    assert table.core.phase is Phase.EVAL_BEFORE
    table.arrive(leases[-1:])
    assert table.core.phase is Phase.TRAIN
    assert {lease.kind for lease in _all(table)} == {EpisodeKind.TRAIN}
    assert table.counts()["eval"]["evaluated"] == 4
    assert table.core.status()["eval"]["before"] == 1.0


def test_failed_evaluation_episode_is_retried() -> None:
    table = _table()
    leases = _all(table)
    table.arrive(leases[1:])
    for attempt in range(3):
        assert table.core.phase is Phase.EVAL_BEFORE
        again = leases[:1] if attempt == 0 else _all(table)
        assert [(x.episode_id, x.attempt) for x in again] == [("eval-before-model/0", attempt)]
        table.arrive(again, end_reason=EndReason.ENV_ERROR)
    assert table.core.phase is Phase.TRAIN
    counts = table.counts()["eval"]
    assert (counts["evaluated"], counts["failed"]) == (3, 1)
    assert counts["causes"] == {"failed:env_error": 1}
    assert table.core.status()["eval"]["groups"]["eval-before-model"]["num"] == 3


def test_evaluation_after_training_needs_the_final_weights() -> None:
    table = _table(before=False)
    table.step(1, is_last=True)
    assert table.core.phase is Phase.EVAL_AFTER
    grant = table.ask("actor-0", 10, version=0)
    assert grant.leases == []
    assert grant.reason == "weights: the actor has version 0, version 1 is needed"
    leases = _all(table, version=1)
    assert {lease.group_id for lease in leases} == {"eval-after-model"}
    table.arrive(leases)
    assert table.core.phase is Phase.DONE


def test_items_and_seeds_are_equal_before_and_after() -> None:
    table = _table()
    before = _all(table)
    table.arrive(before)
    table.step(1, is_last=True)
    after = _all(table, version=1)
    assert [(x.item_id, x.seed) for x in before] == [(x.item_id, x.seed) for x in after]


def test_last_step_does_not_cut_the_first_evaluation() -> None:
    evaluation = EvalSection(num_items=4, after=False, baselines=False)
    table = Table(make_config(num_steps=0, evaluation=evaluation))
    table.hello("actor-0")
    table.step(0, is_last=True)
    leases = _all(table)
    assert len(leases) == 4
    table.arrive(leases)
    assert table.core.phase is Phase.DONE


def test_resume_skips_the_first_evaluation() -> None:
    table = _table()
    leases = _all(table)
    table.hello("learner", version=1)
    assert table.core.phase is not Phase.EVAL_BEFORE
    assert table.core.version == 1
    table.arrive(leases)
    assert table.counts()["eval"]["lost"] == 0


def test_disabled_evaluation_plays_nothing() -> None:
    assert _table(before=False).core.phase is Phase.TRAIN


def test_status_shows_progress_of_evaluation() -> None:
    evaluation = EvalSection(num_items=3, baselines=True, before=True, after=False)
    table = Table(make_config(evaluation=evaluation))
    table.hello("actor-0")
    assert table.core.status()["progress"] == {"num_done": 0, "num_total": 9}
    leases = table.ask("actor-0", 9).leases
    table.arrive(leases[:4])  # the first group of three is closed by that
    assert table.core.status()["progress"] == {"num_done": 4, "num_total": 9}
    table.arrive(leases[4:])
    assert table.core.phase is Phase.TRAIN
    assert table.core.status()["progress"] == {"num_done": 0, "num_total": 0}


def _restarted(table: Table, *, num_steps: int) -> Table:
    """Return the table of a scheduler that restores the state with another number of steps."""
    restarted = Table(edited(table.cfg, {"train.num_steps": num_steps}))
    restarted.core.restore(table.core.snapshot())
    restarted.core.continue_training()
    restarted.hello("learner", version=table.core.version)
    restarted.hello("actor-0", version=table.core.version)
    return restarted


def test_finished_run_with_more_steps_trains_again() -> None:
    table = _table(before=False)
    table.step(1, is_last=True)
    table.arrive(_all(table, version=1))
    table = _restarted(table, num_steps=2)
    assert table.core.phase is Phase.TRAIN
    assert {lease.kind for lease in _all(table, version=1)} == {EpisodeKind.TRAIN}
    table.step(2, is_last=True)
    leases = _all(table, version=2)
    assert {lease.group_id for lease in leases} == {"eval-after-2-model"}
    table.arrive(leases[:3])
    table.arrive(leases[3:], end_reason=EndReason.ENV_ERROR)
    assert table.core.phase is Phase.EVAL_AFTER
    table.arrive(_all(table, version=2))
    assert table.core.phase is Phase.DONE
    assert table.core.status()["eval"]["groups"]["eval-after-2-model"]["num"] == 4
    assert table.counts()["lost"] == table.counts()["eval"]["lost"] == 0


@pytest.mark.parametrize("num_steps", [1, 2])
def test_finished_run_without_more_steps_stays_finished(num_steps: int) -> None:
    table = _table(before=False)
    table.step(2, is_last=True)
    table.arrive(_all(table, version=2))
    assert _restarted(table, num_steps=num_steps).core.phase is Phase.DONE


def test_more_steps_abandon_the_open_evaluation_of_the_earlier_end() -> None:
    table = _table(before=False)
    table.step(1, is_last=True)
    table.arrive(_all(table, version=1)[:1])
    table = _restarted(table, num_steps=2)
    assert table.core.phase is Phase.TRAIN
    assert {lease.kind for lease in _all(table, version=1)} == {EpisodeKind.TRAIN}
    assert table.counts()["eval"]["causes"] == {"failed:continued": 3}
    assert table.counts()["eval"]["lost"] == 0
