"""The learner's line to the scheduler: what it must know, told again to one that restarted."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from common.errors import LongstrideError
from common.messages import Heartbeat, Hello, Outcomes, Progress, Rejected, Welcome
from common.run_dir import RunDir
from common.security import RunKeys
from common.sockets import connect_dealer
from common.wire import decode, encode

logger = logging.getLogger(__name__)


class SchedulerLink:
    """Queues messages from any thread, sends them from one.

    Everything ever told is kept, because a scheduler that restarts may be a little behind; it
    ignores what it knows. Reports are merged, so that a busy second costs one message.

    Example: queue(a), queue(b) -> pump() sends one Outcomes with both. The scheduler dies and
    returns under a new epoch -> pump() says hello, hears welcome, sends all of the history.
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
        self._run_dir = run_dir
        self._keys = keys
        self._hello = hello
        self._silence_s = silence_s
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._outbox: deque[Any] = deque()
        self._history: list[Any] = []
        self._context = zmq.Context()
        self._socket: Any = None
        self._address = ""
        self._run_epoch = ""
        self._last_heard = time.monotonic()

    # --- any thread -------------------------------------------------------------------------

    def remember(self, message: Any) -> None:
        """Keep a message for schedulers to come, without sending it to the present one."""
        with self._lock:
            self._history.append(message)

    def queue(self, message: Any) -> None:
        """Keep a message, and send it with the next pump."""
        with self._lock:
            self._history.append(message)
            self._outbox.append(message)

    # --- the sending thread -----------------------------------------------------------------

    def connect(self, *, timeout_s: float) -> None:
        """Connect and say hello. Raises: LongstrideError: no scheduler says where it listens."""
        self._address = self._run_dir.wait_for_address("scheduler", timeout_s=timeout_s)
        self._open()

    def _open(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)
        self._socket = connect_dealer(self._context, self._keys, address=self._address)
        self._last_heard = time.monotonic()
        self._send(self._hello)

    def pump(self) -> None:
        """Hear what has come, send what is queued."""
        while self._socket.poll(0):
            self._hear(decode(self._socket.recv_multipart()))
        self.flush()

    def beat(self, heartbeat: Heartbeat) -> None:
        """Send a heartbeat; follow a scheduler that moved.

        Raises:
            LongstrideError: nothing heard for `silence_s`.
        """
        path = self._run_dir.addresses / "scheduler"
        address = path.read_text().strip() if path.exists() else self._address
        silent_s = time.monotonic() - self._last_heard
        if address != self._address:
            logger.info("scheduler moved from=%s to=%s", self._address, address)
            self._address = address
            self._open()
        elif silent_s > self._silence_s:
            raise LongstrideError(f"scheduler silent for {silent_s:.0f}s at {self._address}")
        self._send(heartbeat)

    def _hear(self, message: Any) -> None:
        self._last_heard = time.monotonic()
        match message:
            case Welcome():
                is_new = message.run_epoch != self._run_epoch
                self._run_epoch = message.run_epoch
                if is_new:
                    self._tell_everything()
            case Progress():
                if self._run_epoch and message.run_epoch != self._run_epoch:
                    self._send(self._hello)
                self._on_progress(message)
            case Rejected():
                raise LongstrideError(f"the scheduler refused a message: {message.reason}")
            case _:
                raise LongstrideError(f"unexpected {type(message).__name__} from the scheduler")

    def _tell_everything(self) -> None:
        with self._lock:
            batch = list(self._history)
            self._outbox.clear()
        self._send_merged(batch)

    def flush(self) -> None:
        """Send what is queued. Before the first welcome all of it waits."""
        if not self._run_epoch:
            return
        with self._lock:
            batch, self._outbox = list(self._outbox), deque()
        self._send_merged(batch)

    def _send_merged(self, batch: list[Any]) -> None:
        news: list[Outcomes] = []
        for message in batch:
            if isinstance(message, Outcomes):
                news.append(message)
            else:
                self._send_news(news)
                news = []
                self._send(message)
        self._send_news(news)

    def _send_news(self, news: list[Outcomes]) -> None:
        if news:
            self._send(
                Outcomes(
                    version=news[-1].version,
                    seen=[seen for report in news for seen in report.seen],
                    outcomes=[outcome for report in news for outcome in report.outcomes],
                    groups=[group for report in news for group in report.groups],
                    num_duplicates=sum(report.num_duplicates for report in news),
                )
            )

    def _send(self, message: Any) -> None:
        self._socket.send_multipart(encode(message))

    def close(self) -> None:
        """Close the socket; what is queued is sent first."""
        if self._socket is not None:
            self._socket.close(linger=500)
        self._context.term()
