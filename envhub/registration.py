"""Registration of a run's hub: it reports its address to the scheduler periodically."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import zmq

from common.cpu import family_cpu_s
from common.errors import LongstrideError
from common.memory import resident_bytes
from common.wire.addresses import Addresses, advertised, node_name
from common.wire.following_dealer import FollowingDealer
from common.wire.messages import HubGoodbye, HubHello, HubNoted, HubUse, Rejected
from common.wire.security import RunKeys

logger = logging.getLogger(__name__)

CONNECT_S = 1.0  # Timeout of a connection to a known address.
# Seconds between two measurements of memory and CPU, which read the state of each process.
MEASURE_S = 5.0


class Registration(threading.Thread):
    """Sends a hello every `every_s` and follows a scheduler that changes its address.

    Consumes: the scheduler's answers.
    Waits for: the scheduler's address, and its answers, `silence_s` at most.
    Unblocked by: the address, the answers, and `stop`.

    A failure, or the end of the run, ends the hub by a signal to this process; the failure is in
    `error`. If `silence_s` is None, another process ends the hub, and the thread waits for a
    scheduler as long as the hub serves.
    """

    def __init__(
        self,
        addresses: Addresses,
        keys: RunKeys,
        hello: HubHello,
        *,
        every_s: float,
        silence_s: float | None,
        refused: Callable[[], dict[str, int]] = dict,
        sessions: Callable[[], tuple[int, int]] = lambda: (0, 0),
        paused: Callable[[], dict[str, str]] = dict,
    ) -> None:
        """Prepare the thread.

        Args:
            sessions: returns the numbers of live and of possible sessions.
            paused: returns the environments that wait for a service, with the reasons.
        """
        super().__init__(name="registration", daemon=True)
        self._addresses = addresses
        self._hello = hello
        self._every_s = every_s
        self._silence_s = silence_s
        self._refused = refused
        self._sessions = sessions
        self._paused = paused
        self._use = HubUse()
        self._measure_at = 0.0
        self._context = zmq.Context()
        self._dealer = FollowingDealer(addresses, "scheduler", keys, context=self._context)
        self._stop_requested = threading.Event()
        self.error: Exception | None = None

    def run(self) -> None:
        """Register until the run ends or `stop` is called."""
        try:
            while self._addresses.find_address("scheduler") is None:
                if self._stop_requested.wait(self._every_s):
                    return
            self._dealer.connect(timeout_s=CONNECT_S)
            while not self._is_over():
                self._dealer.follow()
                self._dealer.send(self._current_hello())
                self._stop_requested.wait(self._every_s)
            hello = self._hello
            self._dealer.send(HubGoodbye(name=hello.name, incarnation=hello.incarnation))
        except LongstrideError as error:
            self.error = error
        finally:
            self._dealer.close(linger_s=0.5)
            self._context.term()
        if not self._stop_requested.is_set() and self._silence_s is not None:
            os.kill(os.getpid(), signal.SIGTERM)

    def _current_hello(self) -> HubHello:
        """Return the hello with the hub's current address, use and refusals."""
        place = self._hello.place
        url = advertised(place.url, towards=self._dealer.address)
        num, most = self._sessions()
        use = replace(self._used(), num_sessions=num, max_sessions=most)
        message = replace(self._hello, node=node_name(self._dealer.address), use=use)
        place = replace(place, url=url)
        return replace(message, place=place, refused=self._refused(), paused=self._paused())

    def _used(self) -> HubUse:
        """Return memory and CPU in use, as last measured."""
        if time.monotonic() >= self._measure_at:
            self._measure_at, pid = time.monotonic() + MEASURE_S, os.getpid()
            self._use = HubUse(rss_bytes=resident_bytes([pid])[pid], cpu_s=family_cpu_s())
        return self._use

    def _is_over(self) -> bool:
        """Return whether to end. Raises: LongstrideError: refused, or silence for too long."""
        for message in self._dealer.take_all():
            if isinstance(message, Rejected):
                raise LongstrideError(f"the scheduler refused this hub: {message.reason}")
            if isinstance(message, HubNoted) and message.is_finished:
                logger.info("the run has ended")
                return True
        if self._silence_s is not None and self._dealer.silent_s > self._silence_s:
            silent_s = self._dealer.silent_s
            where = self._dealer.address
            raise LongstrideError(f"no message from the scheduler at {where} for {silent_s:.0f} s")
        return self._stop_requested.is_set()

    def stop(self, *, timeout_s: float) -> None:
        """Send a goodbye, so that no more episodes are assigned to this hub, and end the thread."""
        self._stop_requested.set()
        self.join(timeout_s)
