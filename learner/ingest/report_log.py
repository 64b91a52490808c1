"""What the scheduler must know, kept until it has it on disk."""

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

from common.wire.messages import Outcomes, StepDone

Report = Outcomes | StepDone
Entry = TypeVar("Entry")
MAX_ENTRIES = 5_000  # Entries of one message: any number of them would exceed the wire's limits.


class ReportLog:
    """Reports in order, numbered until acknowledged. Any thread queues, one thread sends.

    A scheduler that restarts may be a little behind, so what it has not saved is sent again; it
    ignores what it knows. Reports that follow each other are merged, so that a busy second costs
    one message, and numbered, so that one that was lost on the way is noticed.

    Example: queue(a), queue(b), queue(step) -> take_unsent() is [a + b as 1, step as 2].
    acknowledge(1): a and b are forgotten. restart() -> take_unsent() is [step as 1].
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: deque[Report] = deque()  # not saved by the scheduler yet, oldest first
        self.num_saved = 0  # reports that went before those: no scheduler can forget them
        self._unsent: list[Report] = []  # the last ones of them
        self._num_sent = 0  # of all reports, to the present scheduler
        self._sent: deque[tuple[int, int]] = deque()  # (number, reports sent up to it)
        self.last_number = 0  # of the last message taken since the restart, after merging

    def queue(self, report: Report) -> int:
        """Keep a report to be sent. Returns: how many were queued by now."""
        with self._lock:
            self._kept.append(report)
            self._unsent.append(report)
            return self.num_saved + len(self._kept)

    def restart(self) -> None:
        """Begin again at number 1 with the oldest report that is not saved."""
        with self._lock:
            self._num_sent, self.last_number = self.num_saved, 0
            self._sent.clear()
            self._unsent = list(self._kept)

    def take_unsent(self) -> list[Report]:
        """Return what was not taken since the restart, merged and numbered."""
        with self._lock:
            news, self._unsent = self._unsent, []
        messages: list[Report] = []
        for message in _merged(news):
            self.last_number += 1
            messages.append(replace(message, number=self.last_number))
        if news:
            self._num_sent += len(news)
            self._sent.append((self.last_number, self._num_sent))
        return messages

    def acknowledge(self, number: int) -> None:
        """Forget the reports of messages up to `number`: the scheduler has saved them."""
        num_saved = self.num_saved
        while self._sent and self._sent[0][0] <= number:
            num_saved = self._sent.popleft()[1]
        with self._lock:
            for _ in range(num_saved - self.num_saved):
                self._kept.popleft()
            self.num_saved = num_saved


def _merged(reports: Iterable[Report]) -> Iterator[Report]:
    """Yield the reports in order, outcomes that follow each other as one."""
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
            yield from _pieces(_as_one(together))
            together = []
            num_entries = 0
        together.append(report)
        num_entries += _num_entries(report)
    if together:
        yield from _pieces(_as_one(together))


def _num_entries(report: Outcomes) -> int:
    return len(report.seen) + len(report.groups) + len(report.outcomes)


def _as_one(reports: list[Outcomes]) -> Outcomes:
    return Outcomes(
        seen=[seen for report in reports for seen in report.seen],
        outcomes=[outcome for report in reports for outcome in report.outcomes],
        groups=[group for report in reports for group in report.groups],
        num_duplicates=sum(report.num_duplicates for report in reports),
    )


def _pieces(report: Outcomes) -> Iterator[Outcomes]:
    """Yield a report whole, or in pieces that keep the order in which the scheduler reads one."""
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
