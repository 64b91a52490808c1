"""Publishing: every version goes to every engine that listens; a dead one is left behind.

One thread owns the weight plane. A transfer is: offer -> each engine freezes and says ready ->
broadcast -> each engine reports what it loaded. Whoever misses a deadline is dropped from the
membership; the others go on in a new process group. Late joiners get the current version at once.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common.errors import LongstrideError, WeightSyncError
from common.wire.collective import (
    BroadcastGroup,
    backend_for,
    checksum,
    device_id,
    flatten_into,
    lay_out,
    open_store,
)
from common.wire.messages import (
    CanaryScores,
    Rejected,
    TensorSpec,
    WeightsJoin,
    WeightsLoaded,
    WeightsOffer,
    WeightsReady,
)
from common.wire.sockets import Router

logger = logging.getLogger(__name__)

POLL_S = 0.02
STOP_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedWeights:
    """One version, flat, and what both sides need to check it."""

    version: int
    buffer: Tensor  # [num_bytes] uint8
    tensors: list[TensorSpec]
    checksum: str
    canary_token_ids: list[list[int]]
    canary_logprobs: list[list[float]]  # [canary, seq-1] nats by the trainer, same weights
    canary_masks: list[list[bool]]  # [canary, seq-1] True on the tokens to compare


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """An engine that takes weights. A restart has a new incarnation and is a new member."""

    sender: bytes
    actor: str
    incarnation: str
    device: str  # a GPU's own name; "" for the CPU


def snapshot(
    version: int,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    canary_token_ids: list[list[int]],
    canary_logprobs: list[list[float]],
    canary_masks: list[list[bool]] | None = None,
) -> PublishedWeights:
    """Return a copy of the policy's tensors, ready to be sent while training goes on.

    Args:
        tensors: (name, tensor) of the policy.
        canary_token_ids: [canary, seq] what both sides score.
        canary_logprobs: [canary, seq-1] nats by the trainer, with these very weights.
        canary_masks: [canary, seq-1] True on tokens that a policy sampled; None: compare all. What
            nobody would sample has huge logprobs, and rounding of huge numbers says little.
    """
    named = list(tensors)
    specs, num_bytes = lay_out(named)
    buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=named[0][1].device)
    flatten_into(buffer, specs, (tensor for _, tensor in named))
    return PublishedWeights(
        version=version,
        buffer=buffer,
        tensors=specs,
        checksum=checksum(buffer),
        canary_token_ids=canary_token_ids,
        canary_logprobs=canary_logprobs,
        canary_masks=canary_masks or [[True] * len(row) for row in canary_logprobs],
    )


class Publisher(threading.Thread):
    """The learner's side of the weight plane.

    Example: publish(v3) returns when v3 is at its engines. An engine that died meanwhile costs
    that one call up to `timeout_s`, then it is no member any more; with no member left, publish
    returns at once, and whoever joins later is given the newest version.
    """

    def __init__(self, router: Router, *, host: str, timeout_s: float, max_canary_delta: float):
        super().__init__(name="publisher", daemon=True)
        self._router = router
        self.port = router.port
        self._host = host
        self._timeout_s = timeout_s
        self._max_canary_delta = max_canary_delta
        self._store = open_store(host, 0, is_server=True, timeout_s=timeout_s)
        self._group: BroadcastGroup | None = None
        self._group_members: tuple[_Member, ...] = ()
        self._epoch = 0
        self._members: dict[str, _Member] = {}  # by actor name
        self._devices: dict[str, str] = {}  # by actor name, of all that ever joined
        self._newcomers: list[_Member] = []
        self._changed = threading.Condition()
        self._wanted: PublishedWeights | None = None
        self._current: PublishedWeights | None = None
        self._recent: dict[int, PublishedWeights] = {}
        self._stop_requested = threading.Event()
        self._error: BaseException | None = None
        self._metrics: dict[str, float] = {}
        self._alarms: dict[str, int] = {}  # by actor name, in a row

    # --- main thread ------------------------------------------------------------------------

    def publish(
        self, weights: PublishedWeights, *, is_stopping: Callable[[], bool] = lambda: False
    ) -> bool:
        """Send a version to all members; True when it is there, False if told to stop first.

        Raises:
            LongstrideError: the publisher's thread failed, or did not finish in bounded time.
        """
        started = time.monotonic()
        deadline = started + 3 * self._timeout_s
        with self._changed:
            self._wanted = weights
            while self._wanted is not None:
                if self._error is not None:
                    raise LongstrideError(f"publisher failed: {self._error}") from self._error
                if time.monotonic() > deadline:
                    raise WeightSyncError(
                        f"version {weights.version} not published to {sorted(self._members)} "
                        f"within {3 * self._timeout_s:g}s"
                    )
                if is_stopping():
                    return False
                self._changed.wait(0.5)
            self._metrics["publish/total_s"] = time.monotonic() - started
        return True

    @property
    def num_canary_alarms(self) -> int:
        """Versions in a row on which the worst engine and the trainer disagreed."""
        return max(self._alarms.values(), default=0)

    def drain_metrics(self) -> dict[str, float]:
        """Return what the transfers and canaries since the last call measured."""
        with self._changed:
            metrics, self._metrics = self._metrics, {}
            metrics["weights/members"] = float(len(self._members))
            metrics["weights/canary_alarms"] = float(self.num_canary_alarms)
            return metrics

    def stop(self) -> None:
        """End the thread and close its sockets and groups.

        A thread that is blocked in a broadcast ends with the process.
        """
        self._stop_requested.set()
        self.join(timeout=STOP_S)

    # --- the thread -------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until stopped; a failure is kept and raised in the main thread."""
        try:
            while not self._stop_requested.is_set():
                self._hear(POLL_S)
                if self._wanted is not None:
                    self._send_wanted()
                elif self._newcomers and self._current is not None:
                    newcomers, self._newcomers = self._newcomers, []
                    self._transfer(self._current, newcomers)
        except Exception as e:
            logger.exception("publisher failed")
            with self._changed:
                self._error = e
                self._changed.notify_all()
        finally:
            if self._group is not None:
                self._group.close()
            self._router.close()

    def _send_wanted(self) -> None:
        weights = self._wanted
        assert weights is not None
        self._current = weights
        self._recent = {v: w for v, w in self._recent.items() if v > weights.version - 4}
        self._recent[weights.version] = weights
        self._newcomers = []
        self._transfer(weights, list(self._members.values()))
        with self._changed:
            self._wanted = None
            self._changed.notify_all()

    def _hear(self, timeout_s: float) -> list[tuple[_Member, Any]]:
        """Receive; joins and canaries are handled here, the rest is returned."""
        others: list[tuple[_Member, Any]] = []
        for received in self._router.receive_all(timeout_s=timeout_s):
            message = received.message
            if isinstance(message, WeightsJoin):
                self._join(received.sender, message)
            elif isinstance(message, CanaryScores):
                self._compare(message)
            elif isinstance(message, WeightsReady | WeightsLoaded):
                member = self._members.get(message.actor)
                if member is not None and member.incarnation == message.incarnation:
                    others.append((member, message))
                elif isinstance(message, WeightsLoaded):  # it was dropped, but is alive
                    self._join(received.sender, message)
            else:
                name = type(message).__name__
                self._router.send(received.sender, Rejected(reason=f"{name} is not for weights"))
        return others

    def _member(self, sender: bytes, message: WeightsJoin | WeightsLoaded) -> _Member:
        if isinstance(message, WeightsJoin):
            self._devices[message.actor] = message.device
        return _Member(
            sender=sender,
            actor=message.actor,
            incarnation=message.incarnation,
            device=self._devices.get(message.actor, ""),
        )

    def _join(self, sender: bytes, message: WeightsJoin | WeightsLoaded) -> None:
        member = self._member(sender, message)
        logger.info("joined actor=%s incarnation=%s", message.actor, message.incarnation)
        self._members[message.actor] = member
        self._newcomers = [m for m in self._newcomers if m.actor != message.actor] + [member]

    def _transfer(self, weights: PublishedWeights, members: list[_Member]) -> None:
        """Bring one version to the given members; drop those that fail, retry with the rest.

        A broken transfer does not say who broke it. The dead are silent at the next offer; if
        there is no silence, one transfer each tells.
        """
        num_broken = 0
        while members:
            try:
                failed = self._transfer_once(weights, members)
            except WeightSyncError as e:
                logger.error("transfer failed version=%d reason=%s", weights.version, e)
                self._leave_group()
                num_broken += 1
                if len(members) > 1 and num_broken == 1:
                    continue
                if len(members) > 1:
                    for member in members:
                        self._transfer(weights, [member])
                    return
                failed = members
            for member in failed:
                logger.error("dropped actor=%s version=%d", member.actor, weights.version)
                has_asked_again = member in self._newcomers  # after its failure: still a member
                if self._members.get(member.actor) == member and not has_asked_again:
                    del self._members[member.actor]
            if not failed:  # a member that asked again meanwhile has what it asked for
                self._newcomers = [m for m in self._newcomers if m not in members]
                return
            self._leave_group()
            members = [member for member in members if member not in failed]

    def _transfer_once(self, weights: PublishedWeights, members: list[_Member]) -> list[_Member]:
        """Offer, wait for all to be ready, broadcast, wait for all to have loaded.

        Returns:
            The members that missed a deadline or loaded something else.
        """
        if tuple(members) != self._group_members or self._group is None:
            self._leave_group()
            self._epoch += 1
        own_device = device_id(weights.buffer.device)
        backend = backend_for([own_device, *(member.device for member in members)])
        for rank, member in enumerate(members, start=1):
            self._router.send(member.sender, self._offer(weights, rank, len(members) + 1, backend))
        silent = self._collect(members, WeightsReady, weights.version)
        if silent:
            return list(silent)
        if self._group is None:
            self._group = BroadcastGroup(
                self._store,
                epoch=self._epoch,
                rank=0,
                world_size=len(members) + 1,
                backend=backend,
                timeout_s=self._timeout_s,
                bind_host=self._host,
            )
            self._group_members = tuple(members)
        self._group.broadcast(weights.buffer if backend == "nccl" else weights.buffer.cpu())
        return list(self._collect(members, WeightsLoaded, weights.version))

    def _offer(
        self, weights: PublishedWeights, rank: int, world_size: int, backend: str
    ) -> WeightsOffer:
        return WeightsOffer(
            version=weights.version,
            group_epoch=self._epoch,
            rank=rank,
            world_size=world_size,
            store_host=self._host,
            store_port=self._store.port,
            backend=backend,
            timeout_s=self._timeout_s,
            tensors=weights.tensors,
            total_bytes=weights.buffer.numel(),
            checksum=weights.checksum,
            canary_token_ids=weights.canary_token_ids,
        )

    def _collect(self, members: list[_Member], kind: type, version: int) -> set[_Member]:
        """Wait for one message of `kind` from each member; return who failed or is silent."""
        waiting, failed = set(members), set()
        deadline = time.monotonic() + self._timeout_s
        while waiting and time.monotonic() < deadline and not self._stop_requested.is_set():
            for member, message in self._hear(POLL_S):
                if message.version != version or message.group_epoch != self._epoch:
                    continue
                if isinstance(message, WeightsLoaded) and not message.is_ok:
                    logger.error("not loaded actor=%s reason=%s", member.actor, message.error)
                    failed.add(member)
                    waiting.discard(member)
                elif isinstance(message, kind):
                    waiting.discard(member)
                    self._note_loaded(message)
            waiting = {m for m in waiting if self._members.get(m.actor) == m} & waiting
        for member in waiting:
            logger.error("silent actor=%s kind=%s", member.actor, kind.__name__)
        gone = {m for m in members if self._members.get(m.actor) != m}
        return waiting | failed | gone

    def _note_loaded(self, message: Any) -> None:
        if isinstance(message, WeightsLoaded):
            with self._changed:
                pause_s = max(self._metrics.get("publish/pause_s", 0.0), message.pause_s)
                self._metrics["publish/pause_s"] = pause_s

    def _compare(self, message: CanaryScores) -> None:
        """Hold the engine's canary scores against the trainer's of the same version."""
        weights = self._recent.get(message.version)
        if weights is None or not weights.canary_logprobs:
            return
        delta = _mean_delta(weights.canary_logprobs, message.logprobs, weights.canary_masks)
        is_alarm = not delta <= self._max_canary_delta  # a NaN is an alarm
        with self._changed:
            self._metrics["weights/canary_abs_logprob"] = max(
                delta, self._metrics.get("weights/canary_abs_logprob", 0.0)
            )
            self._alarms[message.actor] = self._alarms.get(message.actor, 0) + 1 if is_alarm else 0
        if is_alarm:
            logger.error(
                "engine and trainer disagree actor=%s version=%d mean_abs_logprob=%.4f limit=%g",
                message.actor,
                message.version,
                delta,
                self._max_canary_delta,
            )

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = None
        self._group_members = ()


def _mean_delta(
    ours: list[list[float]], theirs: list[list[float]], masks: list[list[bool]]
) -> float:
    """Return the mean |difference| in nats; NaN if the rows do not belong together."""
    if [len(row) for row in ours] != [len(row) for row in theirs] or not any(ours):
        return math.nan
    deltas = [
        abs(a - b)
        for our_row, their_row, mask in zip(ours, theirs, masks, strict=True)
        for a, b, is_compared in zip(our_row, their_row, mask, strict=True)
        if is_compared
    ]
    return sum(deltas) / len(deltas) if deltas else math.nan
