"""The learner's connection to the scheduler: hello, heartbeats, and the reports of the log."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import zmq

from common.errors import LongstrideError
from common.store.run_dir import RunDir
from common.wire.addresses import advertised, node_name
from common.wire.following_dealer import FollowingDealer
from common.wire.messages import Goodbye, Heartbeat, Hello, Progress, Rejected, Welcome
from common.wire.security import RunKeys
from learner.ingest.report_log import ReportLog

logger = logging.getLogger(__name__)


class SchedulerClient:
    """Sends the report log to whichever scheduler there is. For one thread.

    Example: pump() sends report 1. The scheduler saves it, receives report 2, dies and returns
    under a new epoch -> pump() says hello, receives the welcome, sends the second report again.
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
    ) -> None:
        """Make one that is not connected; `on_progress` takes each answer to a heartbeat.

        After `silence_s` without an answer the scheduler counts as gone.
        """
        self._reports = reports
        self.hello = hello
        self._silence_s = silence_s
        self._on_progress = on_progress
        self.others_refused: Callable[[], dict[str, int]] = dict  # by the learner's other listeners
        self.refused_elsewhere: dict[str, int] = {}  # by scheduler and hubs, as it last said
        self._context = zmq.Context()
        self._dealer = FollowingDealer(
            run_dir, "scheduler", keys, context=self._context, hello=self._greet
        )
        self._run_epoch = ""

    def connect(self, *, timeout_s: float) -> None:
        """Connect and say hello. Raises: LongstrideError: no scheduler says where it listens."""
        self._dealer.connect(timeout_s=timeout_s)

    def _greet(self) -> Hello:
        """Begin anew on a new connection: all that is kept is sent again after the welcome."""
        self._run_epoch = ""
        return self._hello_from_here()

    def _hello_from_here(self) -> Hello:
        towards = self._dealer.address
        addresses = {
            role: advertised(address, towards=towards)
            for role, address in self.hello.addresses.items()
        }
        return replace(self.hello, addresses=addresses, node=node_name(towards))

    def pump(self) -> None:
        """Take in what has come, send what is queued."""
        for message in self._dealer.take_all():
            self._receive(message)
        self.flush()

    def beat(self, heartbeat: Heartbeat) -> None:
        """Beat; follow a scheduler that moved. Raises: LongstrideError: it is silent."""
        silent_s = self._dealer.silent_s
        if not self._dealer.follow() and silent_s > self._silence_s:
            address = self._dealer.address
            raise LongstrideError(f"scheduler silent for {silent_s:.0f}s at {address}")
        num_reports = self._reports.last_number if self._run_epoch else 0
        self._dealer.send(replace(heartbeat, num_reports=num_reports))

    def _receive(self, message: Any) -> None:
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
                    self._dealer.send(self._hello_from_here())
                self.refused_elsewhere = message.refused or self.refused_elsewhere
                self._on_progress(message)
                if is_same:
                    self._look_for_gap(message)
            case Rejected():
                raise LongstrideError(f"the scheduler refused a message: {message.reason}")
            case _:
                raise LongstrideError(f"unexpected {type(message).__name__} from the scheduler")

    def _look_for_gap(self, progress: Progress) -> None:
        """Connect again if a message was lost with a connection that broke and came back.

        One connection keeps its order: what went before a heartbeat that is answered is heard, or
        will never be.
        """
        if progress.num_heard < min(progress.num_reports, self._reports.last_number):
            logger.warning(
                "scheduler misses report=%d, has all up to %d; sending again",
                *(progress.num_reports, progress.num_heard),
            )
            self._dealer.reopen()

    def flush(self) -> None:
        """Send what is queued. Before the welcome all of it waits."""
        if self._run_epoch:
            for message in self._reports.take_unsent():
                self._dealer.send(message)

    def leave(self) -> None:
        """Send what is queued, and say goodbye: nobody need wait for this learner."""
        self.flush()
        hello = self.hello
        self._dealer.send(Goodbye(role=hello.role, name=hello.name, incarnation=hello.incarnation))

    def close(self) -> None:
        """Close the socket; what was sent has half a second to leave."""
        self._dealer.close(linger_s=0.5)
        self._context.term()
