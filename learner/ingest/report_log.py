"""The learner's reports to the scheduler, kept until the scheduler has saved them."""

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

from common.wire.messages import Outcomes, StepDone

Report = Outcomes | StepDone
Entry = TypeVar("Entry")
# Most entries of one message; an unlimited number would exceed the wire's limits.
MAX_ENTRIES = 5_000


class ReportLog:
    """Reports in order, numbered until acknowledged. Any thread queues, one thread sends.

    A restarted scheduler may have lost its latest reports. So reports that it has not saved are
    sent again, and it ignores those it already has. Consecutive reports are merged, so that a busy
    second costs one message. Messages are numbered, so that a lost one is detected.

    Example: queue(a), queue(b), queue(step) -> take_unsent() is [a + b as 1, step as 2].
    acknowledge(1): a and b are dropped. restart() -> take_unsent() is [step as 1].
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Reports that the scheduler has not saved, oldest first.
        self._kept: deque[Report] = deque()
        self.num_saved = 0  # Number of reports before `_kept`; the scheduler has saved them.
        self._unsent: list[Report] = []  # The part of `_kept` that is not sent yet.
        # Reports sent to the current scheduler, counted from the start of the log.
        self._num_sent = 0
        # (Number of a message, reports sent up to that message.)
        self._sent: deque[tuple[int, int]] = deque()
        self.last_number = 0  # Number of the last message taken since the restart.

    def queue(self, report: Report) -> int:
        """Queue a report. Returns: number of reports queued so far."""
        with self._lock:
            self._kept.append(report)
            self._unsent.append(report)
            return self.num_saved + len(self._kept)

    def restart(self) -> None:
        """Restart the numbering at 1 with the oldest report that is not saved."""
        with self._lock:
            self._num_sent = self.num_saved
            self.last_number = 0
            self._sent.clear()
            self._unsent = list(self._kept)

    def take_unsent(self) -> list[Report]:
        """Return the reports not taken since the restart, merged and numbered."""
        with self._lock:
            news = self._unsent
            self._unsent = []
        messages: list[Report] = []
        for message in _merged(news):
            self.last_number += 1
            messages.append(replace(message, number=self.last_number))
        if news:
            self._num_sent += len(news)
            self._sent.append((self.last_number, self._num_sent))
        return messages

    def acknowledge(self, number: int) -> None:
        """Drop the reports in messages up to `number`: the scheduler has saved them."""
        num_saved = self.num_saved
        while self._sent and self._sent[0][0] <= number:
            num_saved = self._sent.popleft()[1]
        with self._lock:
            for _ in range(num_saved - self.num_saved):
                self._kept.popleft()
            self.num_saved = num_saved


def _merged(reports: Iterable[Report]) -> Iterator[Report]:
    """Yield the reports in order; consecutive outcomes are merged."""
    outcomes: list[Outcomes] = []
    for report in reports:
        if isinstance(report, Outcomes):
            outcomes.append(report)
            continue
        yield from _joined(outcomes)
        outcomes = []
        yield report
    yield from _joined(outcomes)


def _joined(reports: list[Outcomes]) -> Iterator[Outcomes]:
    """Yield the reports in as few messages as MAX_ENTRIES allows."""
    together: list[Outcomes] = []
    num_entries = 0
    for report in reports:
        if together and num_entries + _num_entries(report) > MAX_ENTRIES:
            yield from _pieces(_merge_outcomes(together))
            together = []
            num_entries = 0
        together.append(report)
        num_entries += _num_entries(report)
    if together:
        yield from _pieces(_merge_outcomes(together))


def _num_entries(report: Outcomes) -> int:
    return len(report.seen) + len(report.groups) + len(report.outcomes)


def _merge_outcomes(reports: list[Outcomes]) -> Outcomes:
    """Return consecutive reports of outcomes as one report."""
    return Outcomes(
        seen=[seen for report in reports for seen in report.seen],
        outcomes=[outcome for report in reports for outcome in report.outcomes],
        groups=[group for report in reports for group in report.groups],
        num_duplicates=sum(report.num_duplicates for report in reports),
    )


def _pieces(report: Outcomes) -> Iterator[Outcomes]:
    """Yield a report whole, or in pieces that keep the scheduler's order of processing."""
    if _num_entries(report) <= MAX_ENTRIES:
        yield report
        return
    for part in _batched(report.seen):
        yield Outcomes(seen=part)
    for part in _batched(report.groups):
        yield Outcomes(groups=part)
    for part in _batched(report.outcomes):
        yield Outcomes(outcomes=part)
    if report.num_duplicates:
        yield Outcomes(num_duplicates=report.num_duplicates)


def _batched(entries: list[Entry]) -> Iterator[list[Entry]]:
    """Yield lists of at most MAX_ENTRIES entries."""
    for start in range(0, len(entries), MAX_ENTRIES):
        yield entries[start : start + MAX_ENTRIES]
