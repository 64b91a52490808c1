"""Weight updates on the actor's side: accepts the learner's offers and reports each load."""

import asyncio
import logging
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from actor.engine.engine import Engine
from common.errors import LongstrideError, WeightSyncError
from common.text import valid_text
from common.weights.messages import (
    CanaryCheck,
    CanaryScores,
    EngineSleep,
    WeightsCancel,
    WeightsJoin,
    WeightsLeave,
    WeightsLoaded,
    WeightsOffer,
    WeightsPing,
    WeightsReady,
)
from common.weights.node_copy import CopyUnreachable, node_id
from common.weights.transport import TransferCancelled
from common.wire.addresses import Addresses, host_of, local_address_towards
from common.wire.messages import Rejected
from common.wire.security import RunKeys
from common.wire.sockets import FollowingDealer

logger = logging.getLogger(__name__)

FOLLOW_S = 0.5  # Seconds between two checks of the learner's address.
MAX_FAILURES = 5  # Failed transfers in a row that end the actor.


class WeightLink:
    """Joins the learner's weight plane and loads every version that it offers.

    Consumes: offers and their cancellation, requests to score. Waits for: the engine's workers,
    which have their own deadlines. Unblocked by: a newer offer, a cancellation, or a new address of
    the learner.

    It sends a `WeightsJoin` as a heartbeat, also during an update. An engine that the learner
    removed, or that reconnected, rejoins by that message. `version_loaded` is set after every
    version; no episode starts before the first.
    """

    def __init__(
        self,
        addresses: Addresses,
        keys: RunKeys,
        engine: Engine,
        *,
        hello: WeightsJoin,
        exclusive: asyncio.Lock,
        context: Any,
        heartbeat_s: float = 1.0,
    ) -> None:
        self._engine = engine
        self._join = hello
        self._node = node_id()
        self._identity = {"actor": hello.actor, "incarnation": hello.incarnation}
        self._exclusive = exclusive
        self._heartbeat_s = heartbeat_s
        self._dealer = FollowingDealer(
            addresses, "weights", keys, context=context, hello=self._hello
        )
        self._num_failures = 0
        self._num_scored = 0
        self._newest: WeightsOffer | None = None  # The offer to take next.
        self._at: WeightsOffer | None = None
        self._is_announced = False
        self._is_given_up = False
        self._check: CanaryCheck | None = None
        self._sleep = 0  # Number of the latest request to sleep.
        self._slept = 0  # Number of the latest one that the engine has obeyed.
        self._has_work = asyncio.Event()
        self.version_loaded = asyncio.Event()
        self.is_loading = False

    async def connect(self, *, timeout_s: float) -> None:
        """Connect and join. Raises: LongstrideError: the learner publishes no address in time."""
        await self._dealer.connect_soon(timeout_s=timeout_s)

    async def run(self) -> None:
        """Answer offers until cancelled; reconnect when the learner's address changes."""
        loops = (self._listen(), self._send_heartbeats(), self._work())
        tasks = [asyncio.create_task(loop) for loop in loops]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _listen(self) -> None:
        """Receive the learner's messages, and reconnect when its address changes."""
        while True:
            if self._dealer.follow():
                self._newest = None
                self._is_given_up = True
            message = await self._dealer.next(timeout_s=FOLLOW_S)
            if message is not None:
                self._receive(message)

    async def _send_heartbeats(self) -> None:
        """Send a `WeightsJoin` at each heartbeat interval, also during an update."""
        while True:
            await asyncio.sleep(self._heartbeat_s)
            self._dealer.send(self._hello())

    def _hello(self) -> WeightsJoin:
        """Return the message that registers this engine, with its current state."""
        host = local_address_towards(host_of(self._dealer.address))
        return replace(
            self._join,
            version=self._engine.version,
            host=host,
            busy_epoch=0 if self._at is None else self._at.group_epoch,
            quiet_s=self._engine.quiet_s,
            slept=self._slept,
            node=self._node,
        )

    def _receive(self, message: Any) -> None:
        """Record a message of the learner; `_work` processes it."""
        match message:
            case WeightsOffer():
                if self._at == message and not self._is_given_up:  # The learner resent the offer.
                    if self._is_announced:
                        self._report_ready(message)
                    return
                self._newest = message
                self._is_given_up = True
                self._has_work.set()
            case WeightsCancel():
                if self._newest is not None and self._newest.group_epoch == message.group_epoch:
                    self._newest = None
                elif self._at is not None and self._at.group_epoch == message.group_epoch:
                    self._is_given_up = True
            case CanaryCheck():
                self._check = message
                self._has_work.set()
            case EngineSleep():
                self._sleep = message.number
                self._has_work.set()
            case WeightsPing():
                pass
            case Rejected():
                raise LongstrideError(f"the learner refused a message: {message.reason}")
            case _:
                raise LongstrideError(
                    f"unexpected message from the learner: {type(message).__name__}"
                )

    async def _work(self) -> None:
        """Process the newest offer, one at a time."""
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            if self._sleep != self._slept:
                await self._fall_asleep(self._sleep)
            self._at = self._newest
            self._newest = None
            check = self._check
            self._check = None
            if self._at is not None:
                self._is_announced = self._is_given_up = False
                await self._answer(self._at)
            elif self._engine.can_sample and check and check.version == self._engine.version:
                async with self._exclusive:
                    await self._report_canary(check)

    async def _fall_asleep(self, number: int) -> None:
        """Give the engine's memory back, between two turns, and report it."""
        async with self._exclusive:
            await self._engine.sleep()
        self._slept = number
        self._dealer.send(self._hello())

    async def _answer(self, offer: WeightsOffer) -> None:
        """Stage and load one offer, and report. A failed transfer leaves the old weights."""
        failure: WeightSyncError | None = None
        stage_s = pause_s = 0.0
        try:
            stage_s = await self._engine.stage(
                offer,
                announce=lambda: self._report_ready(offer),
                is_given_up=lambda: self._is_given_up,
            )
        except WeightSyncError as error:
            failure = error
            logger.error("weights not received version=%d reason=%s", offer.version, error)
        # If the engine cannot sample, the holder of the lock waits for this load. Taking the lock
        # would then deadlock.
        async with self._exclusive if self._engine.can_sample else nullcontext():
            if failure is None:
                try:
                    pause_s = await self._load(offer)
                except WeightSyncError as error:
                    failure = error
                    logger.error("weights not loaded, sampling is paused reason=%s", error)
            loaded = WeightsLoaded(
                **self._identity,
                version=offer.version,
                group_epoch=offer.group_epoch,
                is_ok=failure is None,
                error=valid_text(str(failure or ""))[:1_000],
                stage_s=stage_s,
                pause_s=pause_s,
            )
            self._at = None
            self._dealer.send(loaded)
            if failure is not None:
                self._recover(failure)
                return
            if offer.canary_token_ids:
                await self._report_canary(
                    CanaryCheck(version=offer.version, number=0, token_ids=offer.canary_token_ids)
                )
        self._num_failures = 0
        self.version_loaded.set()

    async def _load(self, offer: WeightsOffer) -> float:
        """Load a staged version; return the seconds of the pause."""
        self.is_loading = True
        try:
            return await self._engine.load(offer)
        finally:
            self.is_loading = False

    def _recover(self, failure: WeightSyncError) -> None:
        """Join again after a failed transfer. Raises: WeightSyncError: too many in a row."""
        if isinstance(failure, CopyUnreachable):
            logger.warning("engine shares no copies from now on, each worker receives its own")
            self._node = ""
        # A cancelled transfer is not counted as this engine's failure.
        self._num_failures += not isinstance(failure, TransferCancelled)
        if self._num_failures >= MAX_FAILURES:
            raise WeightSyncError(
                f"{self._num_failures} weight transfers failed in a row: {failure}"
            )
        self._dealer.send(self._hello())

    def _report_ready(self, offer: WeightsOffer) -> None:
        """Report that the engine's workers are ready to receive an offer."""
        self._is_announced = True
        version = offer.version
        epoch = offer.group_epoch
        self._dealer.send(WeightsReady(**self._identity, version=version, group_epoch=epoch))

    async def _report_canary(self, check: CanaryCheck) -> None:
        """Score canary prompts, and send the logprobs to the learner."""
        self._num_scored += 1
        request_id = f"canary-{check.version}-{self._num_scored}"
        scores = await self._engine.score(check.token_ids, request_id=request_id)
        answer = CanaryScores(
            actor=self._join.actor, version=check.version, logprobs=scores, number=check.number
        )
        self._dealer.send(answer)

    def close(self) -> None:
        """Leave the weight plane, so that the learner does not wait for this engine, and close."""
        if self._dealer.address:
            self._dealer.send(WeightsLeave(**self._identity))
        self._dealer.close(linger_s=0.5)
