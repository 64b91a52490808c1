"""The learner's connection to the scheduler: hello, heartbeats, and the queued reports."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import zmq

from common.errors import LongstrideError
from common.store.run_dir import RunDir
from common.wire.addresses import advertised, node_name
from common.wire.config_messages import LiveConfig
from common.wire.following_dealer import FollowingDealer
from common.wire.messages import Goodbye, Heartbeat, Hello, Progress, Rejected, Welcome
from common.wire.security import RunKeys
from learner.ingest.report_log import ReportLog

logger = logging.getLogger(__name__)


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
