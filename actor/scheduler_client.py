"""The actor's connection to the scheduler: registration, leases, heartbeats."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from common.errors import LongstrideError, PeerMissing
from common.wire.addresses import AddressBook, node_name
from common.wire.messages import (
    Directory,
    Goodbye,
    Heartbeat,
    Hello,
    LeaseGrant,
    LeaseRequest,
    LiveConfig,
    Progress,
    Rejected,
    Welcome,
)
from common.wire.security import RunKeys
from common.wire.sockets import FollowingDealer

logger = logging.getLogger(__name__)

ANSWER_S = 5.0  # Seconds after which an unanswered request is sent again.
FOLLOW_S = 0.5  # Seconds between two checks of the scheduler's address.


class SchedulerClient:
    """Client of the scheduler. It reconnects when the scheduler restarts.

    `run` receives the answers. Requests are sent without waiting, so a dead scheduler blocks no
    episode.
    """

    def __init__(
        self, book: AddressBook, keys: RunKeys, *, hello: Hello, context: Any, silence_s: float
    ) -> None:
        self._hello = hello
        self.book = book
        self._silence_s = silence_s
        self._dealer = FollowingDealer(
            book, "scheduler", keys, context=context, hello=self._current_hello
        )
        self._grant: asyncio.Future[LeaseGrant] | None = None
        self.run_epoch = ""
        # The values of the live keys; None: the run has not changed any.
        self.live_config: LiveConfig | None = None
        self.is_finished = asyncio.Event()

    async def connect(self, *, timeout_s: float) -> None:
        """Connect and register. Raises: PeerMissing: no scheduler publishes its address in time."""
        await self._dealer.connect_soon(timeout_s=timeout_s)

    @property
    def _config_number(self) -> int:
        """Number of the known live values, for hellos and heartbeats."""
        return 0 if self.live_config is None else self.live_config.number

    def _current_hello(self) -> Hello:
        """Return the hello with the node's name and the numbers of the known messages."""
        node = node_name(self._dealer.address)
        number = self._config_number
        return replace(self._hello, directory=self.book.number, config=number, node=node)

    async def learn_addresses(self, *, timeout_s: float) -> None:
        """Wait until the scheduler has sent the addresses of learner, weights and hubs.

        Raises: PeerMissing: the scheduler has no learner in time.
        """
        deadline = time.monotonic() + timeout_s
        while not self.book.is_complete:
            if time.monotonic() > deadline:
                where = self._dealer.address
                raise PeerMissing(
                    f"no learner registered with the scheduler at {where} within {timeout_s:g} s"
                )
            self._dealer.follow()
            message = await self._dealer.next(timeout_s=FOLLOW_S)
            if message is None:
                self._dealer.send(self._current_hello())
            else:
                self._receive(message)

    async def request_leases(
        self, *, num_free_slots: int, version: int, absent: Sequence[str] = ()
    ) -> LeaseGrant:
        """Request leases outside the `absent` environments; an empty grant after `ANSWER_S`."""
        self._grant = asyncio.get_running_loop().create_future()
        request = LeaseRequest(
            actor=self._hello.name, num_free_slots=num_free_slots, version=version, absent=[*absent]
        )
        self._dealer.send(request)
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._grant
        except TimeoutError:
            logger.warning("no answer from the scheduler after_s=%g", ANSWER_S)
            return LeaseGrant(leases=[], retry_after_s=0.2, reason="no answer")

    def beat(self, heartbeat: Heartbeat) -> None:
        """Send a heartbeat. Raises: PeerMissing: no message arrived for `silence_s`."""
        silent_s = self._dealer.silent_s
        if silent_s > self._silence_s:
            raise PeerMissing(
                f"no message from the scheduler at {self._dealer.address} for {silent_s:.0f} s"
            )
        number = self._config_number
        self._dealer.send(replace(heartbeat, directory=self.book.number, config=number))

    async def run(self, on_revoked: Callable[[list[str]], None] = lambda _: None) -> None:
        """Receive until cancelled, and reconnect when the scheduler's address changes.

        `on_revoked` is called with the ids of revoked episodes.
        """
        checked_at = -FOLLOW_S
        while True:
            if time.monotonic() - checked_at >= FOLLOW_S:  # Reads a file, so not for every message.
                self._dealer.follow()
                checked_at = time.monotonic()
            message = await self._dealer.next(timeout_s=FOLLOW_S)
            if message is None:
                continue
            self._receive(message)
            if isinstance(message, Progress) and message.revoked:
                on_revoked(message.revoked)

    def _receive(self, message: Any) -> None:
        """Process one message of the scheduler."""
        match message:
            case LeaseGrant():
                self._accept_grant(message)
            case Progress():
                if message.run_epoch != self.run_epoch:
                    self.book.forget_number()
                    self._dealer.use_newest_version()
                    self._dealer.send(self._current_hello())
                if message.is_finished:
                    self.is_finished.set()
            case Welcome():
                is_other = self.run_epoch not in ("", message.run_epoch)
                self.run_epoch = message.run_epoch
                # A new scheduler numbers its directories from the start, perhaps up to the same
                # number.
                if is_other:
                    self.book.forget_number()
                    self._dealer.send(self._current_hello())
            case Directory():
                self.book.take(message)
            case LiveConfig():
                self.live_config = message
            case Rejected():
                raise LongstrideError(f"the scheduler refused a message: {message.reason}")
            case _:
                raise LongstrideError(
                    f"unexpected message from the scheduler: {type(message).__name__}"
                )

    def _accept_grant(self, grant: LeaseGrant) -> None:
        """Pass a grant to the request that waits for it. A late grant is dropped."""
        if self._grant is not None and not self._grant.done():
            self._grant.set_result(grant)
        elif grant.leases:
            num = len(grant.leases)
            logger.warning("dropped late grant, its leases are issued again leases=%d", num)

    def close(self) -> None:
        """Deregister, so that the leases are issued again at once, and close."""
        if self._dealer.address:
            hello = self._hello
            self._dealer.send(
                Goodbye(role=hello.role, name=hello.name, incarnation=hello.incarnation)
            )
        self._dealer.close(linger_s=0.5)
