"""Finished episodes on their way to the learner: kept and sent again until acknowledged."""

import asyncio
import logging
import time
from typing import Any

import zmq
import zmq.asyncio

from common.errors import LongstrideError
from common.store.run_dir import RunDir
from common.wire.codec import decode, encode
from common.wire.messages import Ack, Rejected, Trajectory
from common.wire.security import RunKeys
from common.wire.sockets import connect_dealer

logger = logging.getLogger(__name__)

RESEND_S = 15.0  # without an acknowledgement
CHECK_S = 1.0  # between looks at the address and at what is overdue


class Delivery:
    """At-least-once delivery with a window. The learner removes duplicates.

    Example (window 2): put(a), put(b) return at once; put(c) waits until a or b is acknowledged.
    A learner that restarts publishes a new address; everything unacknowledged is sent there.
    """

    def __init__(self, run_dir: RunDir, keys: RunKeys, *, window: int, context: Any) -> None:
        self._run_dir = run_dir
        self._keys = keys
        self._context = context
        self._slots = asyncio.Semaphore(window)
        self._pending: dict[str, tuple[Trajectory, float]] = {}  # id -> (episode, last sent)
        self._all_done = asyncio.Event()
        self._all_done.set()
        self._address = ""
        self._socket: Any = None

    @property
    def pending_ids(self) -> list[str]:
        """Episodes that are not acknowledged yet."""
        return list(self._pending)

    def connect(self, *, timeout_s: float) -> None:
        """Connect to the learner. Raises: LongstrideError: it does not say where it listens."""
        self._address = self._run_dir.wait_for_address("learner", timeout_s=timeout_s)
        self._socket = connect_dealer(self._context, self._keys, address=self._address)

    async def put(self, trajectory: Trajectory) -> None:
        """Take over a finished episode; waits while the window is full."""
        await self._slots.acquire()
        if trajectory.episode_id in self._pending:  # issued again meanwhile: the first one counts
            self._slots.release()
            return
        self._all_done.clear()
        self._pending[trajectory.episode_id] = (trajectory, time.monotonic())
        await self._send(trajectory)

    async def drained(self) -> None:
        """Wait until everything is acknowledged. The caller sets the deadline."""
        await self._all_done.wait()

    async def run(self) -> None:
        """Receive acknowledgements and resend, until cancelled."""
        checked = time.monotonic()
        while True:
            if await self._socket.poll(int(CHECK_S * 1_000)):
                self._receive(decode(await self._socket.recv_multipart()))
            if time.monotonic() - checked >= CHECK_S:  # also while acknowledgements stream in
                await self._follow_and_resend()
                checked = time.monotonic()

    def _receive(self, message: Any) -> None:
        if isinstance(message, Rejected):
            raise LongstrideError(f"the learner did not understand a trajectory: {message.reason}")
        if not isinstance(message, Ack):
            raise LongstrideError(f"unexpected {type(message).__name__} from the learner")
        if not message.is_accepted:
            logger.error("refused episode=%s reason=%s", message.episode_id, message.reason)
        if self._pending.pop(message.episode_id, None) is not None:
            self._slots.release()
        if not self._pending:
            self._all_done.set()

    async def _follow_and_resend(self) -> None:
        """Go to the learner's new address if it has one; send again what is overdue."""
        path = self._run_dir.addresses / "learner"
        address = path.read_text().strip() if path.exists() else self._address
        has_moved = address != self._address
        if has_moved:
            logger.info("learner moved from=%s to=%s", self._address, address)
            self._socket.close(linger=0)
            self._address = address
            self._socket = connect_dealer(self._context, self._keys, address=address)
        now = time.monotonic()
        for trajectory, last_sent in list(self._pending.values()):
            if has_moved or now - last_sent > RESEND_S:
                self._pending[trajectory.episode_id] = (trajectory, now)
                await self._send(trajectory)

    async def _send(self, trajectory: Trajectory) -> None:
        try:
            await self._socket.send_multipart(encode(trajectory))
        except zmq.Again:
            logger.warning("send would block episode=%s: kept", trajectory.episode_id)

    def close(self) -> None:
        """Close the socket; what is unacknowledged is the scheduler's to issue again."""
        if self._socket is not None:
            self._socket.close(linger=500)
