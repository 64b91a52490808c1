"""Laws of the notice that there is nothing to learn from."""

from dataclasses import replace

import pytest

from common.wire.messages import Lease, Outcome
from tests.scheduler.builders import Table, joined, seen_of
from tools.dashboard.run_view import Status
from tools.dashboard.verdict import judge


def finish(
    table: Table, num: int, outcome: Outcome, *, seconds: float = 1.0, reward: float = 0.0
) -> None:
    """Let groups be played and end so, one every `seconds`."""
    for _ in range(num):
        leases: list[Lease] = table.ask("actor-0", 4).leases
        seen = [replace(seen_of(each), reward=reward, is_success=reward == 1.0) for each in leases]
        table.report(seen=seen)
        table.clock.now += seconds
        table.finish_group(leases[0].group_id, outcome)
        table.beat("actor-0", [])
        table.core.tick()


@pytest.fixture
def table() -> Table:
    return joined("actor-0", "learner")


def test_minute_without_signal_gives_a_notice_with_remedies(table, caplog):
    finish(table, 3, Outcome.FILTERED, seconds=20.0)
    assert table.core.status()["notice"] == ""  # 40 s, three groups
    finish(table, 1, Outcome.FILTERED, seconds=21.0)
    notice = table.core.status()["notice"]
    assert notice.startswith("No group had signal for 61 s: in 4 groups")
    for remedy in ("Warm-start with `sft`", "widen the horizon", "easier items"):
        assert remedy in notice
    finish(table, 3, Outcome.FILTERED)
    assert sum(notice[:30] in each.message for each in caplog.records) == 1  # not again and again
    assert Status.model_validate(table.core.status()).notice
    assert judge([], {}, table.core.status()).sentence.startswith("No group had signal")


def test_one_group_with_signal_ends_the_notice(table):
    finish(table, 5, Outcome.FILTERED, seconds=20.0)
    assert table.core.status()["notice"]
    finish(table, 1, Outcome.TRAINED)
    assert table.core.status()["notice"] == ""
    finish(table, 2, Outcome.FILTERED)
    assert table.core.status()["notice"] == ""


def test_damaged_groups_do_not_count_as_lacking_signal(table):
    finish(table, 6, Outcome.FAILED, seconds=30.0)
    assert table.core.status()["notice"] == ""


def test_few_groups_without_signal_may_be_chance(table):
    finish(table, 3, Outcome.FILTERED, seconds=100.0)
    assert table.core.status()["notice"] == ""


def test_solved_tasks_want_harder_items(table):
    finish(table, 5, Outcome.FILTERED, seconds=20.0, reward=1.0)
    assert "harder items" in table.core.status()["notice"]
