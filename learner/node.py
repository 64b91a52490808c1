"""A further node of the learner: it starts ranks, and passes the orders of rank 0 to them."""

import logging
import secrets
import signal
import threading
import time

import zmq

from common.config.run_config import RunConfig
from common.errors import PeerMissing
from common.join.enrol import Joined
from common.wire.addresses import reachable
from common.wire.codec import decode, encode
from common.wire.rank_messages import RanksPlace, RanksRequest
from common.wire.sockets import connect_dealer
from learner.node_service import RankService

logger = logging.getLogger(__name__)

ASK_S = 1.0  # Seconds between two requests to the scheduler.
POLL_S = 0.25  # Maximum seconds of one poll.
LOG_S = 30.0  # Seconds between two log lines of a wait for rank 0.


def run_joined(cfg: RunConfig, joined: Joined) -> None:
    """Serve the learner of a run with the ranks of this node, until the run is over.

    Raises: PeerMissing: no learner has registered within `learner.join_timeout_s`.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    node = LearnerNode(cfg, joined, stop)
    try:
        node.run()
    finally:
        node.close()


class LearnerNode:
    """The node process. Its ranks are its child processes. It needs no run directory.

    Example: the scheduler sends the place of rank 0. The node sends beats there and receives the
    rendezvous. It copies the small files of the models, starts its ranks and reports that they have
    loaded. Then it passes on orders. Rank 0 restarts -> the scheduler has another place, or rank 0
    is silent. The node ends its ranks, and starts new ones for the new rank 0.
    """

    def __init__(self, cfg: RunConfig, joined: Joined, stop: threading.Event) -> None:
        """Connect to the scheduler; `stop` ends the node."""
        self._cfg = cfg
        self._joined = joined
        self._stop = stop
        self._number = int(joined.key.name.rpartition("-")[2])
        self._process = secrets.token_hex(6)
        self._keys = joined.key.as_keys()
        self._context = zmq.Context()
        self._scheduler = connect_dealer(self._context, self._keys, address=joined.address)
        self._place = RanksPlace(address="", incarnation="")  # Newest place of rank 0.
        self._ask_at = 0.0
        self._service: RankService | None = None
        self._is_over = False

    def run(self) -> None:
        """Serve one start of rank 0 after another. Raises: PeerMissing: none comes in time."""
        limit_s = self._cfg.learner.join_timeout_s
        served = ""
        idle_since = time.monotonic()
        log_at = idle_since + LOG_S
        while not (self._stop.is_set() or self._is_over):
            self._ask()
            if self._place.address and self._place.incarnation != served:
                served = self._place.incarnation
                self._serve(self._place)
                idle_since = time.monotonic()
            elif time.monotonic() - idle_since > limit_s:
                raise PeerMissing(
                    f"node {self._number} of the learner: no learner of the run has registered at"
                    f" {self._joined.address} within learner.join_timeout_s={limit_s:g}"
                )
            elif time.monotonic() > log_at:
                log_at = time.monotonic() + LOG_S
                logger.info("waiting for the learner's rank 0 scheduler=%s", self._joined.address)
            self._scheduler.poll(int(POLL_S * 1_000))

    def _ask(self) -> None:
        """Receive the scheduler's answers, and request the place of rank 0 again if it is due."""
        while self._scheduler.poll(0):
            message = decode(self._scheduler.recv_multipart())
            if isinstance(message, RanksPlace):
                self._place = message
                self._is_over = self._is_over or message.is_finished
        if time.monotonic() >= self._ask_at:
            self._ask_at = time.monotonic() + ASK_S
            try:
                request = RanksRequest(name=self._joined.key.name)
                self._scheduler.send_multipart(encode(request), zmq.NOBLOCK)
            except zmq.Again:
                logger.warning("queue to the scheduler is full")

    def _serve(self, place: RanksPlace) -> None:
        """Serve one start of rank 0 until it ends, or until this node loses it."""
        address = reachable("learner", place.address, scheduler=self._joined.address)
        logger.info("serving rank 0 address=%s node=%d", address, self._number)
        service = RankService(self._cfg, self._joined, self._number, address, place.incarnation)
        try:
            while not (self._stop.is_set() or service.is_finished or service.is_ended):
                service.work(self._process)
                self._ask()
                if self._place.incarnation not in ("", place.incarnation):
                    logger.warning("rank 0 has restarted")
                    return
            self._is_over = self._is_over or service.is_finished
        finally:
            service.close()

    def close(self) -> None:
        """Close the connection to the scheduler."""
        self._scheduler.close(linger=0)
        self._context.term()
