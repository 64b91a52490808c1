"""Weight updates, the actor's side: answer the learner's offers, report what was loaded."""

import asyncio
import logging
import time
from typing import Any

from actor.engine.engine import Engine
from common.errors import LongstrideError, WeightSyncError
from common.store.run_dir import RunDir
from common.wire.codec import decode, encode
from common.wire.messages import (
    CanaryScores,
    Rejected,
    WeightsJoin,
    WeightsLoaded,
    WeightsOffer,
    WeightsReady,
)
from common.wire.security import RunKeys
from common.wire.sockets import connect_dealer

logger = logging.getLogger(__name__)

REJOIN_S = 5.0  # say hello again while no weights have come
MAX_FAILURES = 5  # transfers in a row


class WeightLink:
    """Joins the learner's weight plane and loads every version it offers.

    `first_version` is set once the engine holds the learner's weights; no episode starts before.
    """

    def __init__(
        self,
        run_dir: RunDir,
        keys: RunKeys,
        engine: Engine,
        *,
        actor: str,
        incarnation: str,
        device: str,
        exclusive: asyncio.Lock,
        context: Any,
    ) -> None:
        self._run_dir = run_dir
        self._keys = keys
        self._engine = engine
        self._actor = actor
        self._incarnation = incarnation
        self._device = device
        self._exclusive = exclusive
        self._context = context
        self._address = ""
        self._socket: Any = None
        self._joined_at = 0.0
        self._num_failures = 0
        self.first_version = asyncio.Event()
        self.is_loading = False

    def connect(self, *, timeout_s: float) -> None:
        """Connect and join. Raises: LongstrideError: the learner does not say where it listens."""
        self._address = self._run_dir.wait_for_address("weights", timeout_s=timeout_s)
        self._socket = connect_dealer(self._context, self._keys, address=self._address)

    async def run(self) -> None:
        """Answer offers until cancelled; rejoin a learner that has moved."""
        await self._join()
        while True:
            if await self._socket.poll(500):
                message = decode(await self._socket.recv_multipart())
                if isinstance(message, Rejected):
                    raise LongstrideError(f"the learner refused: {message.reason}")
                await self._answer(message)
            else:
                await self._follow()

    async def _join(self) -> None:
        self._joined_at = time.monotonic()
        await self._send(
            WeightsJoin(
                actor=self._actor,
                incarnation=self._incarnation,
                device=self._device,
                version=self._engine.version,
            )
        )

    async def _follow(self) -> None:
        path = self._run_dir.addresses / "weights"
        address = path.read_text().strip() if path.exists() else self._address
        if address != self._address:
            logger.info("learner moved from=%s to=%s", self._address, address)
            self._socket.close(linger=0)
            self._address = address
            self._socket = connect_dealer(self._context, self._keys, address=address)
            await self._join()
        elif not self.first_version.is_set() and time.monotonic() - self._joined_at > REJOIN_S:
            await self._join()

    async def _answer(self, offer: WeightsOffer) -> None:
        """Load one offer and report; a failed transfer leaves the old weights and is reported."""
        async with self._exclusive:
            self.is_loading = True
            error = ""
            pause_s = load_s = 0.0
            try:
                report = await self._engine.load(offer, announce=lambda: self._ready(offer))
                pause_s, load_s = report.pause_s, report.load_s
            except WeightSyncError as e:
                error = str(e)
                logger.error("weights not loaded version=%d reason=%s", offer.version, e)
            self.is_loading = False
            await self._send(
                WeightsLoaded(
                    actor=self._actor,
                    incarnation=self._incarnation,
                    version=offer.version,
                    group_epoch=offer.group_epoch,
                    is_ok=not error,
                    error=error[:1_000],
                    pause_s=pause_s,
                    load_s=load_s,
                )
            )
            if error:
                await self._recover(error)
                return
            await self._report_canary(offer)
        self._num_failures = 0
        self.first_version.set()

    async def _recover(self, error: str) -> None:
        """Ask again after a failed transfer. Raises: WeightSyncError: too many in a row."""
        self._num_failures += 1
        if self._num_failures >= MAX_FAILURES:
            raise WeightSyncError(f"{self._num_failures} transfers failed in a row: {error}")
        await self._join()

    async def _ready(self, offer: WeightsOffer) -> None:
        await self._send(
            WeightsReady(
                actor=self._actor,
                incarnation=self._incarnation,
                version=offer.version,
                group_epoch=offer.group_epoch,
            )
        )

    async def _report_canary(self, offer: WeightsOffer) -> None:
        if not offer.canary_token_ids:
            return
        request_id = f"canary-{offer.version}-{offer.group_epoch}"
        scores = await self._engine.score(offer.canary_token_ids, request_id=request_id)
        await self._send(CanaryScores(actor=self._actor, version=offer.version, logprobs=scores))

    async def _send(self, message: Any) -> None:
        await self._socket.send_multipart(encode(message))

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close(linger=200)
