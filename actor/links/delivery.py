"""Finished episodes on their way to the learner: kept and sent again until acknowledged."""

import asyncio
import logging
import time
from typing import Any

from actor.links.waiting import WARN_EVERY_S
from common.errors import LongstrideError
from common.wire.addresses import Addresses
from common.wire.following_dealer import FollowingDealer
from common.wire.messages import Ack, Rejected, Trajectory
from common.wire.security import RunKeys

logger = logging.getLogger(__name__)

RESEND_S = 15.0  # without an acknowledgement
CHECK_S = 1.0  # between looks at the address and at what is overdue


class Delivery:
    """At-least-once delivery with a window. The learner removes duplicates.

    Example (window 2): put(a), put(b) return at once; put(c) waits until a or b is acknowledged.
    A learner that restarts publishes a new address; everything unacknowledged is sent there.
    """

    def __init__(self, addresses: Addresses, keys: RunKeys, *, window: int, context: Any) -> None:
        self._line = FollowingDealer(addresses, "learner", keys, context=context)
        self._slots = asyncio.Semaphore(window)
        self._pending: dict[str, tuple[Trajectory, float]] = {}  # id -> (episode, last sent)
        self._all_done = asyncio.Event()
        self._all_done.set()

    @property
    def pending_ids(self) -> list[str]:
        return list(self._pending)

    async def connect(self, *, timeout_s: float) -> None:
        """Connect to the learner. Raises: LongstrideError: it does not say where it listens."""
        await self._line.connect_soon(timeout_s=timeout_s)

    async def put(self, trajectory: Trajectory) -> None:
        """Take over a finished episode; waits while the window is full."""
        await self._take_slot()
        if trajectory.episode_id in self._pending:  # issued again meanwhile: the first one counts
            self._slots.release()
            return
        self._all_done.clear()
        self._pending[trajectory.episode_id] = (trajectory, time.monotonic())
        self._line.send(trajectory)

    async def _take_slot(self) -> None:
        """Wait for an acknowledgement, aloud: nothing is dropped, however long the learner is."""
        started = time.monotonic()
        while True:
            try:
                async with asyncio.timeout(WARN_EVERY_S):
                    await self._slots.acquire()
                    return
            except TimeoutError:
                waited_s = time.monotonic() - started
                logger.warning("still waiting for=%r waited_s=%.1f", self.waiting_for, waited_s)

    @property
    def waiting_for(self) -> str:
        """Whose acknowledgements finished episodes wait for; "" while there is room for more."""
        num = len(self._pending)
        return f"learner: acknowledgements of {num} episodes" if self._slots.locked() else ""

    async def drained(self) -> None:
        """Wait until everything is acknowledged. The caller sets the deadline."""
        await self._all_done.wait()

    async def run(self) -> None:
        """Receive acknowledgements and resend, until cancelled."""
        checked = time.monotonic()
        while True:
            message = await self._line.next(timeout_s=CHECK_S)
            if message is not None:
                self._receive(message)
            if time.monotonic() - checked >= CHECK_S:  # also while acknowledgements stream in
                self._follow_and_resend()
                checked = time.monotonic()

    def _receive(self, message: Any) -> None:
        if isinstance(message, Rejected):
            raise LongstrideError(f"the learner did not understand a trajectory: {message.reason}")
        if not isinstance(message, Ack):
            raise LongstrideError(f"unexpected {type(message).__name__} from the learner")
        if not message.is_accepted:
            logger.error("refused episode=%s reason=%s", message.episode_id, message.reason)
        for episode_id in (message.episode_id, *message.others):
            if self._pending.pop(episode_id, None) is not None:
                self._slots.release()
        if not self._pending:
            self._all_done.set()

    def _follow_and_resend(self) -> None:
        """Go to the learner's new address if it has one; send again what is overdue."""
        has_moved = self._line.follow()
        now = time.monotonic()
        for trajectory, last_sent in list(self._pending.values()):
            if has_moved or now - last_sent > RESEND_S:
                self._pending[trajectory.episode_id] = (trajectory, now)
                self._line.send(trajectory)

    def close(self) -> None:
        """Close the socket; what is unacknowledged is the scheduler's to issue again."""
        self._line.close(linger_s=0.5)
