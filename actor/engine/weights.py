"""Weight updates, the actor's side: answer the learner's offers, report what was loaded."""

import asyncio
import logging
import time
from typing import Any

from actor.engine.engine import Engine
from common.errors import LongstrideError, WeightSyncError
from common.wire.addresses import Addresses, host_of, local_address_towards
from common.wire.following_dealer import FollowingDealer
from common.wire.messages import Rejected
from common.wire.security import RunKeys
from common.wire.weight_group import TransferCancelled
from common.wire.weight_messages import (
    CanaryScores,
    WeightsJoin,
    WeightsLeave,
    WeightsLoaded,
    WeightsOffer,
    WeightsReady,
)

logger = logging.getLogger(__name__)

REJOIN_S = 5.0  # between hellos: who was given up as dead, or cut off, comes back by them
FOLLOW_S = 0.5  # between looks at the learner's address
MAX_FAILURES = 5  # transfers in a row


class WeightLink:
    """Joins the learner's weight plane and loads every version it offers.

    `version_loaded` is set after every version; no episode starts before the first.
    """

    def __init__(
        self,
        addresses: Addresses,
        keys: RunKeys,
        engine: Engine,
        *,
        actor: str,
        incarnation: str,
        devices: list[str],
        exclusive: asyncio.Lock,
        context: Any,
    ) -> None:
        self._engine = engine
        self._identity = {"actor": actor, "incarnation": incarnation}
        self._devices = devices
        self._exclusive = exclusive
        self._line = FollowingDealer(addresses, "weights", keys, context=context, hello=self._hello)
        self._joined_at = 0.0
        self._num_failures = 0
        self.version_loaded = asyncio.Event()
        self.is_loading = False

    async def connect(self, *, timeout_s: float) -> None:
        """Connect and join. Raises: LongstrideError: the learner does not say where it listens."""
        await self._line.connect_soon(timeout_s=timeout_s)

    async def run(self) -> None:
        """Answer offers until cancelled; join again a learner that has moved or forgot us."""
        while True:
            message = await self._line.next(timeout_s=FOLLOW_S)
            if isinstance(message, Rejected):
                raise LongstrideError(f"the learner refused: {message.reason}")
            if message is not None:
                await self._answer(message)
            elif not self._line.follow() and time.monotonic() - self._joined_at > REJOIN_S:
                self._line.send(self._hello())

    def _hello(self) -> WeightsJoin:
        self._joined_at = time.monotonic()
        host = local_address_towards(host_of(self._line.address))
        return WeightsJoin(
            **self._identity, devices=self._devices, version=self._engine.version, host=host
        )

    async def _answer(self, offer: WeightsOffer) -> None:
        """Stage and load one offer and report; a failed transfer leaves the old weights."""
        failure: WeightSyncError | None = None
        stage_s = 0.0
        try:
            stage_s = await self._engine.stage(offer, announce=lambda: self._ready(offer))
        except WeightSyncError as error:
            failure = error
            logger.error("weights not received version=%d reason=%s", offer.version, error)
        async with self._exclusive:
            pause_s = 0.0 if failure else await self._load(offer)
            loaded = WeightsLoaded(
                **self._identity,
                version=offer.version,
                group_epoch=offer.group_epoch,
                is_ok=failure is None,
                error=str(failure or "")[:1_000],
                stage_s=stage_s,
                pause_s=pause_s,
            )
            self._line.send(loaded)
            if failure is not None:
                self._recover(failure)
                return
            if offer.canary_token_ids:
                await self._report_canary(offer)
        self._num_failures = 0
        self.version_loaded.set()

    async def _load(self, offer: WeightsOffer) -> float:
        self.is_loading = True
        try:
            return await self._engine.load(offer)
        finally:
            self.is_loading = False

    def _recover(self, failure: WeightSyncError) -> None:
        """Ask again after a failed transfer. Raises: WeightSyncError: too many in a row."""
        self._num_failures += not isinstance(failure, TransferCancelled)  # that is another's fault
        if self._num_failures >= MAX_FAILURES:
            raise WeightSyncError(f"{self._num_failures} transfers failed in a row: {failure}")
        self._line.send(self._hello())

    def _ready(self, offer: WeightsOffer) -> None:
        version, epoch = offer.version, offer.group_epoch
        self._line.send(WeightsReady(**self._identity, version=version, group_epoch=epoch))

    async def _report_canary(self, offer: WeightsOffer) -> None:
        request_id = f"canary-{offer.version}-{offer.group_epoch}"
        scores = await self._engine.score(offer.canary_token_ids, request_id=request_id)
        actor = self._identity["actor"]
        self._line.send(CanaryScores(actor=actor, version=offer.version, logprobs=scores))

    def close(self) -> None:
        """Tell the learner not to wait for this engine, and close."""
        if self._line.address:
            self._line.send(WeightsLeave(**self._identity))
        self._line.close(linger_s=0.5)
