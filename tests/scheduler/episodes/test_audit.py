"""Selection audit: each drop is counted once, compared and warned about."""

import json
import logging
from dataclasses import replace

import pytest

from common.wire.messages import EpisodeOutcome, Outcome
from scheduler.episodes.audit import (
    Cell,
    Comparison,
    SelectionAudit,
    bucket_of,
    length_class_of,
    tokens_of,
    turns_of,
)
from scheduler.state import restore, save
from tests.scheduler.builders import Table, make_config, outcome_of, seen_of

LONG, SHORT = Cell("maze", "hard", 20, 4), Cell("maze", "hard", 20, 1)


def _filled(*, long: tuple[int, int], short: tuple[int, int]) -> SelectionAudit:
    """An audit of (trained, stale) episodes."""
    audit = SelectionAudit()
    for cell, (num_trained, num_stale) in ((LONG, long), (SHORT, short)):
        for _ in range(num_trained):
            audit.add(cell, Outcome.TRAINED, "")
        for _ in range(num_stale):
            audit.add(cell, Outcome.STALE, "lag")
    return audit


def test_bucket_is_quarter_of_horizon() -> None:
    assert [bucket_of(turns, 10) for turns in range(11)] == [1, 1, 1, 2, 2, 2, 3, 3, 4, 4, 4]
    assert [turns_of(bucket, 10) for bucket in range(5)] == ["unknown", "1-2", "3-5", "6-7", "8-10"]


def test_z_is_that_of_two_proportions() -> None:
    comparison = Comparison(
        env="e", horizon=9, num_short=100, num_short_dropped=10, num_long=100, num_long_dropped=30
    )
    # pooled 0.2: (0.3 - 0.1) / sqrt(0.2 * 0.8 * 2 / 100)
    assert comparison.z == pytest.approx(3.5355, abs=1e-4)
    assert comparison.is_biased


@pytest.mark.parametrize(
    ("long", "short"),
    [
        ((70, 30), (70, 30)),  # Both are dropped equally often.
        ((90, 10), (70, 30)),  # the other way
        ((20, 20), (990, 10)),  # too few long ones
        ((990, 10), (1000, 0)),  # one in a hundred is no matter
    ],
)
def test_no_warning_without_clear_evidence(
    long: tuple[int, int], short: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    _filled(long=long, short=short).warn()
    assert caplog.records == []


def test_frequent_drops_of_long_episodes_are_warned_about_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    audit = _filled(long=(70, 30), short=(95, 5))
    with caplog.at_level(logging.WARNING):
        audit.warn()
        audit.warn()
    (record,) = caplog.records
    assert "env=maze horizon=20 dropped_long=30/100 dropped_short=5/100" in record.getMessage()


def test_rows_give_the_dropped_share_without_run_end_episodes() -> None:
    audit = _filled(long=(6, 3), short=(1, 0))
    audit.add(LONG, Outcome.FAILED, "deadline")
    audit.add(LONG, Outcome.STALE, "run_ended")
    short, long = audit.report()["rows"]
    assert (short["turns"], short["dropped_frac"]) == ("1-5", 0.0)
    assert (long["turns"], long["num"], long["ended"], long["dropped_frac"]) == (
        "16-20",
        10,
        1,
        0.4,
    )
    other = SelectionAudit()
    restore(other, json.loads(json.dumps(save(audit))))
    assert other.report() == audit.report()


def test_length_classes_double() -> None:
    sizes = (0, 1, 128, 129, 256, 257)
    assert [tokens_of(length_class_of(size)) for size in sizes] == [
        "unknown",
        "1-128",
        "1-128",
        "129-256",
        "129-256",
        "257-512",
    ]


def test_each_sampled_token_is_counted_once_by_length() -> None:
    audit = SelectionAudit()
    short, long = (Cell("maze", "hard", 20, 1, length_class_of(num)) for num in (100, 300))
    audit.add(short, Outcome.TRAINED, "", num_tokens=100)
    audit.add(long, Outcome.TRAINED, "", num_tokens=300)
    audit.add(long, Outcome.STALE, "lag", num_tokens=300)
    audit.add(long, Outcome.STALE, "run_ended", num_tokens=300)
    audit.add(long, Outcome.FAILED, "deadline", num_tokens=300)
    audit.take_back(long, Outcome.FAILED, "deadline", num_tokens=300)
    of_short, of_long = audit.report()["lengths"]
    assert (of_short["tokens"], of_short["dropped_frac"], of_short["dropped_tokens_frac"]) == (
        "1-128",
        0.0,
        0.0,
    )
    assert (of_long["num"], of_long["stale"], of_long["failed"], of_long["ended"]) == (2, 1, 0, 1)
    assert (of_long["sampled_tokens"], of_long["trained_tokens"], of_long["stale_tokens"]) == (
        600,
        300,
        300,
    )
    assert of_long["dropped_tokens_frac"] == 0.5


def test_every_settled_training_episode_is_counted_by_length() -> None:
    table = Table(make_config(max_attempts=1))
    table.hello("actor-0")
    leases = table.ask("actor-0", 8).leases
    arrived = [replace(seen_of(each), num_turns=5, num_sampled_tokens=50) for each in leases[:4]]
    table.report(seen=arrived)
    table.hello("actor-0", incarnation="new")  # the rest is given up
    table.finish_group("g0000000", Outcome.TRAINED)
    lengths = table.core.lifecycle.audit.report()["lengths"]
    assert [(row["tokens"], row["num"], row["trained_tokens"]) for row in lengths] == [
        ("unknown", 4, 0),
        ("1-128", 4, 200),
    ]
    rows = table.core.lifecycle.audit.report()["rows"]
    assert sorted((row["turns"], row["trained"], row["failed"]) for row in rows) == [
        ("4-5", 4, 0),
        ("unknown", 0, 4),
    ]


def test_learner_report_moves_episode_within_audit() -> None:
    table = Table(make_config(max_attempts=1))
    table.hello("actor-0")
    leases = table.ask("actor-0", 4).leases
    table.hello("actor-0", incarnation="new")
    trained: list[EpisodeOutcome] = [outcome_of(x.episode_id, Outcome.TRAINED) for x in leases]
    table.report(outcomes=trained)
    (row,) = table.core.lifecycle.audit.report()["rows"]
    assert (row["trained"], row["failed"]) == (4, 0)


def test_audit_of_an_older_version_has_no_tokens() -> None:
    audit = SelectionAudit()
    audit.add(LONG, Outcome.STALE, "lag")
    older = save(audit)
    del older["tokens"]
    restored = SelectionAudit()
    restore(restored, older)
    restored.take_back(LONG, Outcome.STALE, "lag")
    restored.add(LONG, Outcome.TRAINED, "")
    assert restored.total()[Outcome.TRAINED] == 1
