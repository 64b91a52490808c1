"""Laws of the reports to the scheduler: kept until it has them on disk, and no longer."""

from common.wire.access.bounds import ID_CHARS
from common.wire.codec import decode, encode
from common.wire.messages import EpisodeOutcome, Outcome, Outcomes, StepDone
from learner.ingest.reports import MAX_ENTRIES, Report, ReportLog


def outcomes(*episode_ids: str) -> Outcomes:
    found = [
        EpisodeOutcome(episode_id=episode_id, outcome=Outcome.FILTERED, cause="")
        for episode_id in episode_ids
    ]
    return Outcomes(seen=[], outcomes=found, groups=[], num_duplicates=len(found))


def step(version: int) -> StepDone:
    return StepDone(version=version, is_last=False, max_ahead_steps=1, signals={})


def told(messages: list[Report]) -> list[tuple[int, object]]:
    """Return (number, episodes or version) of each message."""
    return [
        (
            message.number,
            message.version
            if isinstance(message, StepDone)
            else [outcome.episode_id for outcome in message.outcomes],
        )
        for message in messages
    ]


def make_log(*reports: Report) -> ReportLog:
    log = ReportLog()
    for report in reports:
        log.queue(report)
    return log


def test_reports_are_numbered_and_outcomes_merge() -> None:
    log = make_log(outcomes("a"), outcomes("b", "c"), step(1), outcomes("d"))
    messages = log.take_unsent()
    assert told(messages) == [(1, ["a", "b", "c"]), (2, 1), (3, ["d"])]
    assert isinstance(messages[0], Outcomes)
    assert messages[0].num_duplicates == 3
    assert log.take_unsent() == []
    assert log.queue(step(2)) == 5, "reports are counted as they were queued, not as sent"
    assert told(log.take_unsent()) == [(4, 2)]


def test_saved_reports_are_dropped_and_unsaved_ones_resent() -> None:
    log = make_log(outcomes("a"), outcomes("b"), step(1))
    log.take_unsent()
    log.queue(step(2))
    log.take_unsent()
    assert log.num_saved == 0
    log.acknowledge(2)
    assert log.num_saved == 3
    log.restart()
    assert told(log.take_unsent()) == [(1, 2)]
    log.acknowledge(1)
    log.restart()
    assert log.take_unsent() == []


def test_acknowledgement_within_a_message_drops_nothing() -> None:
    """Reports of one message are dropped together: numbers in between are not kept."""
    log = make_log(outcomes("a"), step(1))
    log.take_unsent()
    log.acknowledge(1)
    assert log.num_saved == 0
    log.restart()
    assert told(log.take_unsent()) == [(1, ["a"]), (2, 1)]


def test_late_report_is_sent_once() -> None:
    log = make_log(step(1))
    log.take_unsent()
    log.queue(outcomes("a"))
    log.restart()
    assert told(log.take_unsent()) == [(1, 1), (2, ["a"])]


def test_repeated_or_late_acknowledgement_changes_nothing() -> None:
    log = make_log(step(1))
    log.take_unsent()
    log.acknowledge(1)
    log.acknowledge(1)
    log.queue(step(2))
    log.take_unsent()
    log.acknowledge(1)
    assert log.num_saved == 1
    log.restart()
    log.acknowledge(0)
    assert told(log.take_unsent()) == [(1, 2)]


def test_messages_respect_the_wires_entry_limit() -> None:
    each = "g0000012/3"
    log = make_log(*(outcomes(*[each] * 900) for _ in range(20)), step(1))
    log.queue(outcomes(*[each] * (2 * MAX_ENTRIES + 1)))
    messages = log.take_unsent()
    sizes = [len(m.outcomes) if isinstance(m, Outcomes) else -1 for m in messages]
    # Five reports of 900 are 4,500 entries; one larger than a message comes in pieces.
    assert sizes == [4500, 4500, 4500, 4500, -1, 5000, 5000, 1, 0]
    assert [m.number for m in messages] == list(range(1, 10))
    duplicates = [m.num_duplicates for m in messages if isinstance(m, Outcomes)]
    assert duplicates == [4500, 4500, 4500, 4500, 0, 0, 0, 10_001]
    log.acknowledge(messages[-1].number)
    assert log.num_saved == 22


def test_fullest_message_fits_the_wire() -> None:
    longest = "x" * ID_CHARS
    (message,) = make_log(outcomes(*[longest] * MAX_ENTRIES)).take_unsent()
    assert isinstance(message, Outcomes)
    assert len(decode(encode(message)).outcomes) == MAX_ENTRIES
