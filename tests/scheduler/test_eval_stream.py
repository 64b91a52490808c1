"""Evaluation beside training, through the whole scheduler."""

import json

from common.config.eval import EvalSection
from common.wire.messages import EndReason, EpisodeKind, Lease
from scheduler.evaluation import Phase, eval_lines
from tests.scheduler.builders import Table, ids, make_config


def _table(*, num_steps: int = 10, after: bool = False, every: int = 2) -> Table:
    evaluation = EvalSection(
        num_items=2, before=False, after=after, baselines=False, every_steps=every, stream_items=4
    )
    table = Table(make_config(num_steps=num_steps, evaluation=evaluation))
    table.hello("actor-0")
    table.hello("actor-1")
    return table


def _evals(leases: list[Lease]) -> list[Lease]:
    return [lease for lease in leases if lease.kind is EpisodeKind.EVAL]


def test_evaluation_opens_periodically_and_precedes_training() -> None:
    table = _table()
    table.step(1)
    assert _evals(table.ask("actor-0", 8, version=1).leases) == []
    table.step(2)
    leases = table.ask("actor-0", 5, version=2).leases
    assert ids(_evals(leases)) == [f"eval-step-2-model/{i}" for i in range(4)]
    assert [lease.item_id for lease in leases[:4]] == [
        "easy-test-0",
        "easy-test-1",
        "hard-test-0",
        "hard-test-1",
    ]
    assert [lease.horizon for lease in leases[:4]] == [8, 8, 30, 30]
    assert [lease.opened_at_version for lease in leases[:4]] == [2] * 4
    assert leases[4].kind is EpisodeKind.TRAIN
    assert table.core.phase is Phase.TRAIN


def test_engine_with_older_weights_gets_no_evaluation_episode() -> None:
    table = _table()
    table.step(1)
    table.step(2)
    assert _evals(table.ask("actor-0", 8, version=1).leases) == []
    assert len(_evals(table.ask("actor-1", 8, version=2).leases)) == 4


def test_training_continues_during_an_evaluation() -> None:
    table = _table(every=2)
    table.step(2)
    _evals(table.ask("actor-0", 4, version=2).leases)
    table.step(3)
    assert table.core.version == 3
    assert {lease.kind for lease in table.ask("actor-1", 4, version=3).leases} == {
        EpisodeKind.TRAIN
    }


def test_report_holds_the_versions_of_an_evaluations_episodes() -> None:
    table = _table()
    table.step(2)
    first = table.ask("actor-0", 2, version=2).leases
    table.step(3)
    second = _evals(table.ask("actor-1", 4, version=3).leases)
    table.arrive([*first, *second])
    (told,) = table.core.parts.stream.report()["evals"]
    assert (told["first_started_at"], told["last_started_at"], told["ended_at"]) == (2, 3, 3)
    assert (told["num"], told["num_failed"], told["success"]) == (4, 0, 1.0)


def test_failed_evaluation_episode_is_not_scored() -> None:
    table = _table()
    table.step(2)
    leases = table.ask("actor-0", 4, version=2).leases
    table.arrive(leases[:3])
    table.arrive(leases[3:], end_reason=EndReason.ENV_ERROR)
    for _ in range(2):
        again = _evals(table.ask("actor-0", 1, version=2).leases)
        assert ids(again) == ["eval-step-2-model/3"]
        table.arrive(again, end_reason=EndReason.ENV_ERROR)
    (told,) = table.core.parts.stream.report()["evals"]
    assert (told["num"], told["num_failed"], told["success"]) == (3, 1, 1.0)
    assert table.counts()["eval"]["in_flight"] == 0


def test_overlapping_evaluation_is_skipped_and_counted() -> None:
    table = _table()
    table.step(2)
    leases = table.ask("actor-0", 4, version=2).leases
    table.step(4)
    assert table.core.parts.stream.num_skipped == 1
    table.arrive(leases)
    table.step(6)
    assert [each.step for each in table.core.parts.stream.evals] == [2, 6]


def test_last_version_is_left_to_the_final_evaluation() -> None:
    table = _table(num_steps=2, after=True)
    table.step(2, is_last=True)
    assert table.core.phase is Phase.EVAL_AFTER
    assert table.core.parts.stream.evals == []


def test_run_ends_after_its_last_evaluation() -> None:
    table = _table(num_steps=2)
    table.step(2, is_last=True)
    assert table.core.phase is Phase.EVAL_AFTER
    leases = _evals(table.ask("actor-0", 8, version=2).leases)
    table.arrive(leases)
    assert table.core.phase is Phase.DONE
    assert table.counts()["eval"]["in_flight"] == 0


def test_repeated_step_is_not_evaluated_again() -> None:
    table = _table()
    table.step(2)
    table.arrive(table.ask("actor-0", 4, version=2).leases)
    table.step(2)
    assert [each.step for each in table.core.parts.stream.evals] == [2]


def test_restart_in_the_middle_equals_no_restart() -> None:
    table = _table()
    table.step(2)
    leases = table.ask("actor-0", 4, version=2).leases
    table.arrive(leases[:2])
    twin = _table()
    twin.core.restore(json.loads(json.dumps(table.core.snapshot())))
    for each in (table, twin):
        each.arrive(leases[2:])
        each.step(2)  # trained again by a learner that restarted
        each.step(4)
    assert twin.core.parts.stream.report() == table.core.parts.stream.report()
    assert [each.step for each in twin.core.parts.stream.evals] == [2, 4]


def test_eval_file_has_a_line_per_finished_evaluation() -> None:
    table = _table()
    table.step(2)
    table.arrive(table.ask("actor-0", 4, version=2).leases)
    table.step(4)
    lines = [json.loads(line) for line in eval_lines(table.core.parts.stream.report()).splitlines()]
    assert [(line["step"], line["eval/success"], line["ended_at"]) for line in lines] == [
        (2, 1.0, 2)
    ]


def test_nothing_is_evaluated_beside_training_by_default() -> None:
    table = _table(every=0)
    for step in range(1, 9):
        table.step(step)
    assert table.core.parts.stream.evals == []
