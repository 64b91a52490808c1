"""The learner's connection to the scheduler: hello, heartbeats, and the queued reports."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import zmq

from common.errors import LongstrideError
from common.store.run_dir import RunDir
from common.wire.addresses import advertised, node_name
from common.wire.messages import (
    Goodbye,
    Heartbeat,
    Hello,
    LiveConfig,
    Outcomes,
    Progress,
    Rejected,
    StepDone,
    Welcome,
)
from common.wire.security import RunKeys
from common.wire.sockets import FollowingDealer

logger = logging.getLogger(__name__)

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


class ReportClient:
    """Sends the report log to the current scheduler, also after a restart of it. For one thread.

    Example: pump() sends report 1. The scheduler saves it, receives report 2, dies, and restarts
    with a new epoch -> pump() sends a hello, receives the welcome, and sends report 2 again.
    """

    def __init__(
        self,
        run_dir: RunDir,
        keys: RunKeys,
        reports: ReportLog,
        *,
        hello: Hello,
        silence_s: float,
        on_progress: Callable[[Progress], None],
        others_refused: Callable[[], dict[str, int]] = dict,
    ) -> None:
        """Create a client that is not connected.

        Args:
            silence_s: seconds without an answer after which the scheduler counts as lost.
            on_progress: called with each answer to a heartbeat.
            others_refused: returns the counts of messages that the learner's other listeners
                refused.
        """
        self._reports = reports
        self.hello = hello
        self._silence_s = silence_s
        self._on_progress = on_progress
        self.others_refused = others_refused
        # Messages refused by scheduler and hubs, from the last answer.
        self.refused_elsewhere: dict[str, int] = {}
        self._context = zmq.Context()
        self._dealer = FollowingDealer(
            run_dir, "scheduler", keys, context=self._context, hello=self._greet
        )
        self._run_epoch = ""
        # The values of the live keys; None: the run has not changed any. For any thread.
        self.live_config: LiveConfig | None = None

    @property
    def _config_number(self) -> int:
        """Number of the known live values, for hellos and heartbeats."""
        return 0 if self.live_config is None else self.live_config.number

    def connect(self, *, timeout_s: float) -> None:
        """Connect and send a hello. Raises: LongstrideError: no scheduler publishes its address."""
        self._dealer.connect(timeout_s=timeout_s)

    def _greet(self) -> Hello:
        """Return the hello of a new connection; all kept reports are sent after the welcome."""
        self._run_epoch = ""
        return self._hello_with_addresses()

    def _hello_with_addresses(self) -> Hello:
        """Return the hello with the addresses by which the scheduler's node reaches this one."""
        towards = self._dealer.address
        addresses = {
            role: advertised(address, towards=towards)
            for role, address in self.hello.addresses.items()
        }
        number = self._config_number
        return replace(self.hello, addresses=addresses, node=node_name(towards), config=number)

    def pump(self) -> None:
        """Process the received messages and send the queued reports."""
        for message in self._dealer.take_all():
            self._receive(message)
        self.flush()

    def beat(self, heartbeat: Heartbeat) -> None:
        """Send a heartbeat; reconnect if the scheduler moved.

        Raises: LongstrideError: the scheduler is silent.
        """
        silent_s = self._dealer.silent_s
        if not self._dealer.follow() and silent_s > self._silence_s:
            address = self._dealer.address
            raise LongstrideError(f"The scheduler at {address} sent nothing for {silent_s:.0f} s.")
        num_reports = self._reports.last_number if self._run_epoch else 0
        number = self._config_number
        self._dealer.send(replace(heartbeat, num_reports=num_reports, config=number))

    def _receive(self, message: Any) -> None:
        """Process one message of the scheduler."""
        match message:
            case Welcome():
                is_new = message.run_epoch != self._run_epoch
                self._run_epoch = message.run_epoch
                if is_new:
                    self._reports.restart()
                    self.flush()
            case Progress():
                is_same = message.run_epoch == self._run_epoch
                if is_same:
                    self._reports.acknowledge(message.num_saved)
                elif self._run_epoch:
                    self._dealer.use_newest_version()
                    self._dealer.send(self._hello_with_addresses())
                self.refused_elsewhere = message.refused or self.refused_elsewhere
                self._on_progress(message)
                if is_same:
                    self._check_gap(message)
            case LiveConfig():
                self.live_config = message
            case Rejected():
                raise LongstrideError(
                    f"The scheduler refused a message of the learner: {message.reason}"
                )
            case _:
                raise LongstrideError(
                    f"The scheduler sent an unexpected message: {type(message).__name__}"
                )

    def _check_gap(self, progress: Progress) -> None:
        """Reconnect if a message was lost when the connection broke and recovered.

        A connection keeps the order of messages. So any message sent before an answered heartbeat
        has either been received, or is lost.
        """
        if progress.num_heard < min(progress.num_reports, self._reports.last_number):
            logger.warning(
                "resending reports that the scheduler misses sent=%d received=%d",
                progress.num_reports,
                progress.num_heard,
            )
            self._dealer.reopen()

    def flush(self) -> None:
        """Send the queued reports; before the welcome none are sent."""
        if self._run_epoch:
            for message in self._reports.take_unsent():
                self._dealer.send(message)

    def leave(self) -> None:
        """Send the queued reports and a goodbye, so that no role waits for this learner."""
        self.flush()
        hello = self.hello
        self._dealer.send(Goodbye(role=hello.role, name=hello.name, incarnation=hello.incarnation))

    def close(self) -> None:
        """Close the socket; sent messages have half a second to leave."""
        self._dealer.close(linger_s=0.5)
        self._context.term()
