"""The learner's line to the scheduler: what it must know, told again to one that restarted."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import zmq

from common.errors import LongstrideError
from common.store.run_dir import RunDir
from common.wire.following_dealer import FollowingDealer
from common.wire.messages import Heartbeat, Hello, Outcomes, Progress, Rejected, Welcome
from common.wire.security import RunKeys

logger = logging.getLogger(__name__)


class SchedulerLink:
    """Queues messages from any thread, sends them from one.

    What is told is kept until the scheduler has it on disk, because one that restarts may be a
    little behind; it ignores what it knows. Reports are merged, so that a busy second costs one
    message, and numbered, so that one that was lost on the way is noticed.

    Example: queue(a), queue(b) -> pump() sends one Outcomes with both. The scheduler saves them,
    hears c, dies and returns under a new epoch -> pump() says hello, hears welcome, sends c again.
    """

    def __init__(
        self,
        run_dir: RunDir,
        keys: RunKeys,
        *,
        hello: Hello,
        silence_s: float,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._hello = hello
        self._silence_s = silence_s
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._kept: deque[Any] = deque()  # not saved yet, oldest first
        self._num_saved = 0  # messages that went before those
        self._num_told = 0  # of all messages, to the present scheduler
        self._number = 0  # of the last one sent since its welcome, after merging
        self._sent: deque[tuple[int, int]] = deque()  # (number, messages told up to it)
        self._caught_up = (0, 0.0)  # a number that must be heard of, and since when
        self._context = zmq.Context()
        self._line = FollowingDealer(
            run_dir, "scheduler", keys, context=self._context, hello=self._greet
        )
        self._run_epoch = ""

    # --- any thread -------------------------------------------------------------------------

    def queue(self, message: Any) -> int:
        """Keep a message, and send it with the next pump. Returns: how many were queued by now."""
        with self._lock:
            self._kept.append(message)
            return self._num_saved + len(self._kept)

    @property
    def num_saved(self) -> int:
        """How many of the queued messages, counted from the first, no scheduler can forget."""
        return self._num_saved

    # --- the sending thread -----------------------------------------------------------------

    def connect(self, *, timeout_s: float) -> None:
        """Connect and say hello. Raises: LongstrideError: no scheduler says where it listens."""
        self._line.connect(timeout_s=timeout_s)

    def _greet(self) -> Hello:
        """Begin anew on a new connection: all that is kept will be told after the welcome."""
        self._run_epoch = ""
        return self._hello

    def pump(self) -> None:
        """Hear what has come, send what is queued."""
        for message in self._line.take_all():
            self._hear(message)
        self.flush()

    def beat(self, heartbeat: Heartbeat) -> None:
        """Send a heartbeat; follow a scheduler that moved.

        Raises:
            LongstrideError: nothing heard for `silence_s`.
        """
        silent_s = self._line.silent_s
        if not self._line.follow() and silent_s > self._silence_s:
            raise LongstrideError(f"scheduler silent for {silent_s:.0f}s at {self._line.address}")
        self._line.send(heartbeat)

    def _hear(self, message: Any) -> None:
        match message:
            case Welcome():
                is_new = message.run_epoch != self._run_epoch
                self._run_epoch = message.run_epoch
                if is_new:
                    self._tell_from_the_start()
            case Progress():
                if message.run_epoch == self._run_epoch:
                    self._forget_saved(message)
                elif self._run_epoch:
                    self._line.send(self._hello)
                self._on_progress(message)
                if message.run_epoch == self._run_epoch:
                    self._look_for_gap(message)
            case Rejected():
                raise LongstrideError(f"the scheduler refused a message: {message.reason}")
            case _:
                raise LongstrideError(f"unexpected {type(message).__name__} from the scheduler")

    def _tell_from_the_start(self) -> None:
        self._num_told, self._number = self._num_saved, 0
        self._sent.clear()
        self._caught_up = (0, time.monotonic())
        self.flush()

    def _forget_saved(self, progress: Progress) -> None:
        num_saved = self._num_saved
        while self._sent and self._sent[0][0] <= progress.num_saved:
            num_saved = self._sent.popleft()[1]
        with self._lock:
            for _ in range(num_saved - self._num_saved):
                self._kept.popleft()
            self._num_saved = num_saved

    def _look_for_gap(self, progress: Progress) -> None:
        """A message may be lost with a connection that broke and came back."""
        now = time.monotonic()
        wanted, since = self._caught_up
        if progress.num_heard >= wanted:
            self._caught_up = (self._number, now)
        elif now - since > self._silence_s:
            logger.warning(
                "scheduler has not heard of message=%d, only up to %d; telling it again",
                wanted,
                progress.num_heard,
            )
            self._line.reopen()

    def flush(self) -> None:
        """Send what is queued. Before the welcome all of it waits."""
        if not self._run_epoch:
            return
        with self._lock:
            news = list(islice(self._kept, self._num_told - self._num_saved, None))
        if not news:
            return
        for message in _merged(news):
            self._number += 1
            self._line.send(replace(message, number=self._number))
        self._num_told += len(news)
        self._sent.append((self._number, self._num_told))

    def close(self) -> None:
        """Close the socket; what is queued is sent first."""
        self._line.close(linger_s=0.5)
        self._context.term()


def _merged(messages: Iterable[Any]) -> Iterator[Any]:
    """Yield the messages in order, reports that follow each other as one."""
    reports: list[Outcomes] = []
    for message in messages:
        if isinstance(message, Outcomes):
            reports.append(message)
            continue
        yield from _as_one(reports)
        reports = []
        yield message
    yield from _as_one(reports)


def _as_one(reports: list[Outcomes]) -> list[Outcomes]:
    if not reports:
        return []
    return [
        Outcomes(
            version=reports[-1].version,
            seen=[seen for report in reports for seen in report.seen],
            outcomes=[outcome for report in reports for outcome in report.outcomes],
            groups=[group for report in reports for group in report.groups],
            num_duplicates=sum(report.num_duplicates for report in reports),
        )
    ]
