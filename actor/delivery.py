"""Delivery of finished episodes to the learner: each is kept and resent until acknowledged."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from common.errors import LongstrideError, MessageTooLarge, WireError
from common.text import counted
from common.wire.addresses import Addresses
from common.wire.codec import check_bounds, encode
from common.wire.messages import Ack, EndReason, Rejected, Trajectory
from common.wire.security import RunKeys
from common.wire.sockets import FollowingDealer

logger = logging.getLogger(__name__)

RESEND_S = 15.0  # Seconds without an acknowledgement before an episode is sent again.
CHECK_S = 1.0  # Seconds between two checks of the learner's address and of overdue episodes.
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

WARN_EVERY_S = 10.0


async def wait_with_warnings(
    event: asyncio.Event, *, waiting_for: str, warn_every_s: float = WARN_EVERY_S
) -> None:
    """Wait for an event, and log a warning every `warn_every_s` until it is set.

    The wait has no deadline. The scheduler's silence or a signal cancels the waiting task.
    """
    started = time.monotonic()
    while not event.is_set():
        try:
            async with asyncio.timeout(warn_every_s):
                await event.wait()
        except TimeoutError:
            waited_s = time.monotonic() - started
            logger.warning("still waiting for=%r waited_s=%.1f", waiting_for, waited_s)


def deliverable(trajectory: Trajectory) -> tuple[Trajectory, list[bytes]]:
    """Return an episode that every receiver accepts, and its frames.

    An episode beyond a limit of the wire would break each connection, or be refused each time. It
    becomes a failure that names the limit, and its group continues without it.
    """
    try:
        check_bounds(trajectory)
        return trajectory, encode(trajectory)
    except WireError as error:
        failed = _failure_of(trajectory, error)
        logger.error(
            "trajectory cannot be sent episode=%s reason=%s", trajectory.episode_id, failed.error
        )
        return failed, encode(failed)


def _failure_of(trajectory: Trajectory, error: WireError) -> Trajectory:
    """Return the record of an episode that cannot be sent: its identity and the reason."""
    is_too_large = isinstance(error, MessageTooLarge)
    num_tokens = len(trajectory.token_ids)
    nothing = {name: getattr(trajectory, name)[:0] for name in ARRAYS}
    # When one value is out of bounds, the times may be invalid as well.
    times = {name: getattr(trajectory, name) if is_too_large else 0.0 for name in TIMES}
    return Trajectory(
        **trajectory.identity(),
        actor=trajectory.actor,
        end_reason=EndReason.TOO_LARGE if is_too_large else EndReason.ABORTED,
        error=f"a trajectory of {num_tokens} tokens cannot be sent: {error}"[:1_000],
        reward=0.0,
        is_success=False,
        num_turns=0,
        num_invalid_actions=0,
        **times,
        **nothing,
    )


class Delivery:
    """At-least-once delivery with a window. The learner removes duplicates.

    Example (window 2): put(a), put(b) return at once; put(c) waits until a or b is acknowledged. A
    restarted learner publishes a new address. All unacknowledged episodes are then sent there.
    """

    def __init__(
        self,
        addresses: Addresses,
        keys: RunKeys,
        *,
        window: int,
        context: Any,
        on_acknowledged: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Create the delivery. `on_acknowledged` is called with the id of each such episode."""
        self._on_acknowledged = on_acknowledged
        self._dealer = FollowingDealer(addresses, "learner", keys, context=context)
        self._slots = asyncio.Semaphore(window)
        self._pending: dict[str, tuple[list[bytes], float]] = {}  # id -> (frames, last sent)
        self._all_done = asyncio.Event()
        self._all_done.set()

    @property
    def pending_ids(self) -> list[str]:
        return list(self._pending)

    async def connect(self, *, timeout_s: float) -> None:
        """Connect to the learner. Raises: LongstrideError: its address is not published in time."""
        await self._dealer.connect_soon(timeout_s=timeout_s)

    async def put(self, trajectory: Trajectory) -> None:
        """Accept a finished episode; wait while the window is full.

        An episode that no message can hold is delivered as a failure, see `deliverable`.
        """
        await self._take_slot()
        # The episode was issued twice. The first result counts.
        if trajectory.episode_id in self._pending:
            self._slots.release()
            return
        _, frames = deliverable(trajectory)
        self._all_done.clear()
        self._pending[trajectory.episode_id] = (frames, time.monotonic())
        self._send(frames)

    def send_part(self, trajectory: Trajectory) -> None:
        """Send the turns so far of a running episode once, without an acknowledgement.

        A part that no message can hold is not sent: the episode itself has its turns.
        """
        try:
            check_bounds(trajectory)
            self._send(encode(trajectory))
        except WireError as error:
            logger.warning("part not sent episode=%s reason=%s", trajectory.episode_id, error)

    def _send(self, frames: list[bytes]) -> None:
        self._dealer.send_frames(frames, of=Trajectory.__name__)

    async def _take_slot(self) -> None:
        """Wait for a slot of the window, with regular warnings. No episode is dropped."""
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
        """The reason why `put` waits; "" while the window has room."""
        num = counted(len(self._pending), "episode")
        return f"learner: acknowledgements of {num}" if self._slots.locked() else ""

    async def drained(self) -> None:
        """Wait until all episodes are acknowledged. The caller sets the deadline."""
        await self._all_done.wait()

    async def run(self) -> None:
        """Receive acknowledgements and resend, until cancelled."""
        checked = time.monotonic()
        while True:
            message = await self._dealer.next(timeout_s=CHECK_S)
            if message is not None:
                self._receive(message)
            # Checked by time, so that a stream of acknowledgements cannot delay it.
            if time.monotonic() - checked >= CHECK_S:
                self._follow_and_resend()
                checked = time.monotonic()

    def _receive(self, message: Any) -> None:
        """Process an acknowledgement: the episode leaves the window."""
        if isinstance(message, Rejected):
            raise LongstrideError(f"the learner could not decode a trajectory: {message.reason}")
        if not isinstance(message, Ack):
            raise LongstrideError(f"unexpected message from the learner: {type(message).__name__}")
        if not message.is_accepted:
            logger.error(
                "learner refused trajectory episode=%s reason=%s",
                message.episode_id,
                message.reason,
            )
        for episode_id in (message.episode_id, *message.others):
            if self._pending.pop(episode_id, None) is not None:
                self._slots.release()
                self._on_acknowledged(episode_id)
        if not self._pending:
            self._all_done.set()

    def _follow_and_resend(self) -> None:
        """Switch to the learner's new address if there is one; resend overdue episodes."""
        has_moved = self._dealer.follow()
        now = time.monotonic()
        for episode_id, (frames, last_sent) in list(self._pending.items()):
            if has_moved or now - last_sent > RESEND_S:
                self._pending[episode_id] = (frames, now)
                self._send(frames)

    def close(self) -> None:
        """Close the socket. The scheduler issues unacknowledged episodes again."""
        self._dealer.close(linger_s=0.5)
