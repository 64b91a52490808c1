"""Finished episodes on their way to the learner: kept and sent again until acknowledged."""

import asyncio
import logging
import time
from typing import Any

from actor.links.waiting import WARN_EVERY_S
from common.errors import LongstrideError, MessageTooLarge, WireError
from common.wire.addresses import Addresses
from common.wire.codec import decode, encode
from common.wire.following_dealer import FollowingDealer
from common.wire.messages import Ack, EndReason, Rejected, Trajectory
from common.wire.security import RunKeys

logger = logging.getLogger(__name__)

RESEND_S = 15.0  # without an acknowledgement
CHECK_S = 1.0  # between looks at the address and at what is overdue
TIMES = ("generate_s", "env_s", "wall_s")
# Array fields of a trajectory that have no default.
ARRAYS = (
    "token_ids",
    "loss_mask",
    "logprobs",
    "versions",
    "turn_ids",
    "invalid_turns",
    "turn_scores",
)


def deliverable(trajectory: Trajectory) -> tuple[Trajectory, list[bytes]]:
    """Return an episode that every receiver reads, and its frames.

    An episode beyond a limit of the wire would end each connection that it is sent over, or be
    refused each time. It becomes a failure that names the limit, and its group goes on without it.
    """
    try:
        frames = encode(trajectory)
        decode(frames)
    except WireError as error:
        failed = _failure_of(trajectory, error)
        logger.error("cannot be sent episode=%s reason=%s", trajectory.episode_id, failed.error)
        return failed, encode(failed)
    return trajectory, frames


def _failure_of(trajectory: Trajectory, error: WireError) -> Trajectory:
    """Return the record of an episode that cannot be sent: its identity and the reason."""
    is_too_large = isinstance(error, MessageTooLarge)
    num_tokens = len(trajectory.token_ids)
    nothing = {name: getattr(trajectory, name)[:0] for name in ARRAYS}
    # Beside a value that is out of bounds the others may be as well.
    times = {name: getattr(trajectory, name) if is_too_large else 0.0 for name in TIMES}
    return Trajectory(
        **trajectory.identity(),
        actor=trajectory.actor,
        end_reason=EndReason.TOO_LARGE if is_too_large else EndReason.ABORTED,
        error=f"{num_tokens} tokens cannot be sent: {error}"[:1_000],
        reward=0.0,
        is_success=False,
        num_turns=0,
        num_invalid_actions=0,
        **times,
        **nothing,
    )


class Delivery:
    """At-least-once delivery with a window. The learner removes duplicates.

    Example (window 2): put(a), put(b) return at once; put(c) waits until a or b is acknowledged.
    A learner that restarts publishes a new address; everything unacknowledged is sent there.
    """

    def __init__(self, addresses: Addresses, keys: RunKeys, *, window: int, context: Any) -> None:
        self._line = FollowingDealer(addresses, "learner", keys, context=context)
        self._slots = asyncio.Semaphore(window)
        self._pending: dict[str, tuple[list[bytes], float]] = {}  # id -> (frames, last sent)
        self._all_done = asyncio.Event()
        self._all_done.set()

    @property
    def pending_ids(self) -> list[str]:
        return list(self._pending)

    async def connect(self, *, timeout_s: float) -> None:
        """Connect to the learner. Raises: LongstrideError: it does not say where it listens."""
        await self._line.connect_soon(timeout_s=timeout_s)

    async def put(self, trajectory: Trajectory) -> None:
        """Take over a finished episode; waits while the window is full.

        One that no message can hold is delivered as a failure of itself, see `deliverable`.
        """
        await self._take_slot()
        if trajectory.episode_id in self._pending:  # issued again meanwhile: the first one counts
            self._slots.release()
            return
        _, frames = deliverable(trajectory)
        self._all_done.clear()
        self._pending[trajectory.episode_id] = (frames, time.monotonic())
        self._send(frames)

    def _send(self, frames: list[bytes]) -> None:
        self._line.send_frames(frames, of=Trajectory.__name__)

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
        for episode_id, (frames, last_sent) in list(self._pending.items()):
            if has_moved or now - last_sent > RESEND_S:
                self._pending[episode_id] = (frames, now)
                self._send(frames)

    def close(self) -> None:
        """Close the socket; what is unacknowledged is the scheduler's to issue again."""
        self._line.close(linger_s=0.5)
