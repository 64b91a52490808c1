"""The actor's line to the scheduler: hello, leases, heartbeats."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import zmq

from common.errors import LongstrideError
from common.store.run_dir import RunDir
from common.wire.codec import decode, encode
from common.wire.messages import (
    Heartbeat,
    Hello,
    Lease,
    LeaseGrant,
    LeaseRequest,
    Progress,
    Rejected,
    Welcome,
)
from common.wire.security import RunKeys
from common.wire.sockets import connect_dealer

logger = logging.getLogger(__name__)

ANSWER_S = 5.0  # after which an unanswered request is sent again


class Control:
    """Talks to the scheduler; follows it when it restarts.

    The scheduler's answers arrive in `run`, which fills `leases` and `progress`; asking is a plain
    send, so a dead scheduler never blocks an episode.
    """

    def __init__(
        self, run_dir: RunDir, keys: RunKeys, *, hello: Hello, context: Any, silence_s: float
    ) -> None:
        self._run_dir = run_dir
        self._keys = keys
        self._hello = hello
        self._context = context
        self._silence_s = silence_s
        self._socket: Any = None
        self._address = ""
        self._has_moved = False
        self._last_heard = time.monotonic()
        self._grant: asyncio.Future[LeaseGrant] | None = None
        self.welcome: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()
        self.run_epoch = ""
        self.is_finished = asyncio.Event()
        self.on_revoked: Callable[[list[str]], None] = lambda _: None

    def connect(self, *, timeout_s: float) -> None:
        """Connect and say hello. Raises: LongstrideError: no scheduler says where it listens."""
        self._address = self._run_dir.wait_for_address("scheduler", timeout_s=timeout_s)
        self._open()

    def _open(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)
        self._socket = connect_dealer(self._context, self._keys, address=self._address)
        self._send(self._hello)

    def _send(self, message: Any) -> None:
        try:
            self._socket.send_multipart(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            logger.warning("scheduler queue is full, dropped type=%s", type(message).__name__)

    async def request_leases(self, *, num_free_slots: int, version: int) -> LeaseGrant:
        """Ask for work; an empty grant after `ANSWER_S` without an answer."""
        self._grant = asyncio.get_running_loop().create_future()
        request = LeaseRequest(
            actor=self._hello.name, num_free_slots=num_free_slots, version=version
        )
        self._send(request)
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._grant
        except TimeoutError:
            logger.warning("no answer from the scheduler after_s=%g", ANSWER_S)
            return LeaseGrant(
                run_epoch=self.run_epoch, leases=[], retry_after_s=0.2, reason="no answer"
            )

    def beat(self, heartbeat: Heartbeat) -> None:
        """Send a heartbeat, and look whether the scheduler has moved or fallen silent.

        Raises:
            LongstrideError: nothing heard for `silence_s`.
        """
        silence_s = time.monotonic() - self._last_heard
        if silence_s > self._silence_s:
            raise LongstrideError(f"scheduler silent for {silence_s:.0f}s at {self._address}")
        path = self._run_dir.addresses / "scheduler"
        address = path.read_text().strip() if path.exists() else self._address
        if address != self._address:
            logger.info("scheduler moved from=%s to=%s", self._address, address)
            self._address = address
            self._has_moved = True
        self._send(heartbeat)

    async def run(self) -> None:
        """Receive until cancelled."""
        while True:
            if self._has_moved:  # here, because closing a socket cancels who waits for it
                self._has_moved = False
                self._open()
            if await self._socket.poll(500):
                message = decode(await self._socket.recv_multipart())
                self._last_heard = time.monotonic()
                self._receive(message)

    def _receive(self, message: Any) -> None:
        match message:
            case LeaseGrant():
                self._take(message)
            case Progress():
                if message.run_epoch != self.run_epoch:
                    self._send(self._hello)
                if message.revoked:
                    self.on_revoked(message.revoked)
                if message.is_finished:
                    self.is_finished.set()
            case Welcome():
                self.run_epoch = message.run_epoch
                if not self.welcome.done():
                    self.welcome.set_result(message)
            case Rejected():
                raise LongstrideError(f"the scheduler refused a message: {message.reason}")
            case _:
                raise LongstrideError(f"unexpected {type(message).__name__} from the scheduler")

    def _take(self, grant: LeaseGrant) -> None:
        if self._grant is not None and not self._grant.done():
            self._grant.set_result(grant)
        elif grant.leases:
            leases: list[Lease] = grant.leases
            logger.warning("late grant dropped leases=%d: they will be issued again", len(leases))

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close(linger=200)
