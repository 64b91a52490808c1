"""One version to some engines; a dead one is left behind.

A transfer is: offer -> each engine's workers start to receive and it says ready -> the buckets go
out while it generates -> it freezes, loads and reports. Whoever leaves, falls silent or misses a
deadline is removed; the others are offered the version again at once, in a group without it.
"""

import logging
import threading
import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from common.errors import WeightSyncError
from common.wire.addresses import own_host_towards
from common.wire.collective import ALIGN_BYTES, device_id, open_store
from common.wire.messages import Rejected
from common.wire.sockets import Router
from common.wire.transfer.buckets import NUM_SLOTS
from common.wire.weight_group import TransferCancelled, WeightGroup, cancel
from common.wire.weight_messages import (
    CanaryScores,
    WeightsJoin,
    WeightsLeave,
    WeightsLoaded,
    WeightsOffer,
    WeightsReady,
)
from learner.weights.canary import Canary
from learner.weights.gate import Gate, Reading
from learner.weights.membership import Member, Membership
from learner.weights.routes import PublishSettings, Wave, transport_of, waves
from learner.weights.snapshot import PublishedWeights

logger = logging.getLogger(__name__)

WAIT_S = 0.5  # between looks at deadlines; whatever happens wakes the thread at once
STOP_S = 2.0
GB = 1e9


@dataclass(slots=True)
class _Lane:
    """The group of a wave, kept from version to version."""

    epoch: int
    group: WeightGroup = field(default_factory=WeightGroup)


class Transfers:
    """Brings versions to the members of the weight plane. For the publisher's thread."""

    def __init__(
        self,
        router: Router,
        members: Membership,
        canary: Canary,
        settings: PublishSettings,
        *,
        gate: Gate,
        stop_requested: threading.Event,
    ) -> None:
        self._router = router
        self.members = members
        self.canary = canary
        self._settings = settings
        self._gate = gate
        self._stop_requested = stop_requested
        self._store = open_store(settings.host, 0, is_server=True, timeout_s=settings.timeout_s)
        self._lanes: dict[Wave, _Lane] = {}
        self._left: list[WeightGroup] = []
        self._slots: list[Tensor] = []  # two buckets, on the device that sends
        self._last_epoch = 0
        self._epoch = 0  # of the transfer that runs
        self._answers: dict[tuple[type, Member], Any] = {}  # of this epoch and version
        self._lock = threading.Lock()
        self._metrics: dict[str, float] = {}
        self.current: PublishedWeights | None = None

    def drain_metrics(self) -> dict[str, float]:
        """Return what the transfers since the last call measured. For any thread."""
        with self._lock:
            metrics, self._metrics = self._metrics, {}
        return metrics

    def close(self) -> None:
        """Leave the groups and close the store; whoever waits in one fails now."""
        groups = [*self._left, *(lane.group for lane in self._lanes.values())]
        for group in groups:
            group.leave()
        self._router.close()
        del self._store
        deadline = time.monotonic() + STOP_S / 2
        for group in groups:
            group.join(timeout_s=max(0.0, deadline - time.monotonic()))

    # --- what comes -------------------------------------------------------------------------

    def receive(self, timeout_s: float) -> None:
        """Take in what comes within `timeout_s`, or what woke the thread."""
        for received in self._router.receive_all(timeout_s=timeout_s):
            message = received.message
            match message:
                case WeightsJoin():
                    self._join(received.sender, message)
                case WeightsLeave():
                    member = self.members.find(message.actor, message.incarnation)
                    if member is not None:
                        self.members.remove(member, reason="it left")
                case CanaryScores():
                    self.canary.compare(message)
                case WeightsReady() | WeightsLoaded():
                    self._note_answer(message)
                case _:
                    reason = f"{type(message).__name__} is not for weights"
                    self._router.send(received.sender, Rejected(reason=reason))
        self.members.forget_silent()

    def _join(self, sender: bytes, join: WeightsJoin) -> None:
        member = Member.of(sender, join)
        choice, current = self._settings.transport, self.current
        if current is not None and not transport_of(member, self._own_device(), choice):
            devices = ", ".join(each or "the CPU" for each in join.devices)
            reason = (
                f"learner.weights_transport={choice.value} cannot reach {join.actor} on {devices}"
                f" from {self._own_device() or 'the CPU'}; use auto"
            )
            self._router.send(sender, Rejected(reason=reason))
            return
        version = current.version if current is not None else -1
        self.members.join(member, version=join.version, current_version=version)

    def _own_device(self) -> str:
        assert self.current is not None
        return device_id(self.current.source.device)

    def _note_answer(self, answer: WeightsReady | WeightsLoaded) -> None:
        member = self.members.find(answer.actor, answer.incarnation)
        is_asked = self.current is not None and answer.version == self.current.version
        if member is None or not is_asked or answer.group_epoch != self._epoch:
            return
        self._answers[type(answer), member] = answer
        if isinstance(answer, WeightsLoaded) and answer.is_ok:
            self._note("publish/pause_s", answer.pause_s, is_sum=False)
            self._note("publish/stage_s", answer.stage_s, is_sum=False)

    def _note(self, name: str, seconds: float, *, is_sum: bool) -> None:
        """Count seconds, the sum or the longest since the last drain, also per GB."""
        assert self.current is not None
        size_gb = self.current.source.total_bytes / GB
        with self._lock:
            for key, value in ((name, seconds), (f"{name}_per_gb", seconds / size_gb)):
                before = self._metrics.get(key, 0.0)
                self._metrics[key] = before + value if is_sum else max(before, value)

    # --- what goes --------------------------------------------------------------------------

    def bring(
        self,
        weights: PublishedWeights,
        members: list[Member],
        *,
        is_held: bool = False,
        is_optional: bool = True,
    ) -> None:
        """Bring one version to the given members; remove those that fail, go on with the rest.

        A broken transfer does not say who broke it. The dead cannot be reached at the next offer;
        if all can, one transfer each tells.

        Args:
            is_held: the gate was entered for this.
            is_optional: the trainer may have the weights back before the first bucket has left.
        """
        reading = Reading(
            self._gate, is_live=weights.source.is_live, is_held=is_held, is_optional=is_optional
        )
        choice, num_parts = self._settings.transport, self._settings.num_parts
        try:
            todo = waves(members, self._own_device(), choice, num_parts=num_parts)
            for number, wave in enumerate(todo, start=1):
                self._bring_wave(weights, wave, reading, is_last=number == len(todo))
        finally:
            reading.end()

    def _bring_wave(
        self, weights: PublishedWeights, wave: Wave, reading: Reading, *, is_last: bool
    ) -> None:
        num_broken = 0
        while wave.members and not self._stop_requested.is_set():
            try:
                served = self._transfer_once(weights, wave, reading, is_last=is_last)
            except WeightSyncError as error:
                self._give_up(weights, wave, error)
                if reading.is_lost or reading.must_not_wait:
                    return  # they are given the next version
                present = tuple(member for member in wave.members if self.members.has(member))
                is_broken = present == wave.members
                num_broken += is_broken
                wave = wave._replace(members=present)
                if is_broken and num_broken > 1:
                    self._transfer_one_by_one(weights, wave, reading)
                    return
                continue
            self._settle(weights, wave, served)
            return

    def _transfer_one_by_one(self, weights: PublishedWeights, wave: Wave, reading: Reading) -> None:
        for member in wave.members:
            alone = wave._replace(members=(member,))
            try:
                served = self._transfer_once(weights, alone, reading, is_last=False)
            except WeightSyncError as error:
                self._give_up(weights, alone, error)
                served = []
            self._settle(weights, alone, served)

    def _give_up(self, weights: PublishedWeights, wave: Wave, error: WeightSyncError) -> None:
        names = ", ".join(member.actor for member in wave.members)
        logger.error(
            "transfer failed version=%d actors=%s reason=%s", weights.version, names, error
        )
        cancel(self._store, self._epoch)
        self._slots = []  # what was given up may still write to them
        self._leave(wave)

    def _settle(self, weights: PublishedWeights, wave: Wave, served: list[Member]) -> None:
        """Remove those that were not served, but for those that have asked again since."""
        self.members.note_served(served)
        failed = [member for member in wave.members if member not in served]
        for member in failed:
            if not self.members.has_asked(member):
                self.members.remove(member, reason=f"version {weights.version} is not loaded")
        if failed:
            self._leave(wave)

    def _transfer_once(
        self, weights: PublishedWeights, wave: Wave, reading: Reading, *, is_last: bool
    ) -> list[Member]:
        """Offer, wait for all to be ready, send, wait for all to have loaded.

        Returns:
            The members that hold the version now.

        Raises:
            WeightSyncError: not all were ready, or the transfer failed; nobody can tell who has
                the version.
        """
        if not reading.begin():
            raise TransferCancelled(f"version {weights.version} is no more")
        lane = self._lane(wave)
        self._epoch, self._answers, members = lane.epoch, {}, wave.members
        offer = self._offer(weights, wave)
        rank = 1
        for member in members:
            if not self._router.send(member.sender, replace(offer, rank=rank)):
                self.members.remove(member, reason="unreachable")
            rank += len(member.devices)
        self._collect(members, WeightsReady, reading)
        is_complete = not self._has_broken(members)
        if is_complete and not reading.must_not_wait:  # else the others had no time to answer
            for member in members:
                if (WeightsReady, member) not in self._answers:
                    self.members.remove(member, reason="not ready in time")
        if reading.must_not_wait or self._has_broken(members):
            raise TransferCancelled(f"not all are ready epoch={self._epoch}")
        seconds = lane.group.send(
            self._sending_slots(offer, weights.source.device),
            weights.source.fill,
            offer,
            is_cancelled=lambda: self._is_cancelled(members, reading),
        )
        self._note("publish/transfer_s", seconds, is_sum=True)
        if is_last:
            reading.end()  # the next step may change the weights while engines load
        self._collect(members, WeightsLoaded, reading)
        answers = {member: self._answers.get((WeightsLoaded, member)) for member in members}
        for member, answer in answers.items():
            if answer is not None and not answer.is_ok:
                logger.error("not loaded actor=%s reason=%s", member.actor, answer.error)
        return [member for member, answer in answers.items() if answer is not None and answer.is_ok]

    def _offer(self, weights: PublishedWeights, wave: Wave) -> WeightsOffer:
        """Return the offer to rank 0, this side itself."""
        return WeightsOffer(
            version=weights.version,
            group_epoch=self._epoch,
            rank=0,
            world_size=1 + sum(len(member.devices) for member in wave.members),
            store_host=own_host_towards(
                self._settings.host, [member.host for member in wave.members]
            ),
            store_port=self._store.port,
            transport=wave.transport,
            folder=self._settings.folder,
            timeout_s=self._settings.timeout_s,
            tensors=weights.tensors,
            total_bytes=weights.source.total_bytes,
            bucket_bytes=-(-self._settings.bucket_bytes // ALIGN_BYTES) * ALIGN_BYTES,
            canary_token_ids=weights.canary_token_ids,
        )

    def _sending_slots(self, offer: WeightsOffer, device: torch.device) -> list[Tensor]:
        """Return the two buckets to send from; they are kept, because memory is slow to get."""
        place = device if offer.transport in ("nccl", "ipc") else torch.device("cpu")
        size = min(offer.bucket_bytes, offer.total_bytes)
        if not self._slots or self._slots[0].device != place or self._slots[0].numel() != size:
            self._slots = []
            is_pinned = device.type == "cuda" and place.type == "cpu"
            make = {"dtype": torch.uint8, "device": place, "pin_memory": is_pinned}
            self._slots = [torch.zeros(size, **make) for _ in range(NUM_SLOTS)]
        return self._slots

    def _collect(self, members: tuple[Member, ...], kind: type, reading: Reading) -> None:
        """Wait until every present member has answered, one has failed, or the time is over."""
        deadline = time.monotonic() + self._settings.timeout_s
        while not self._stop_requested.is_set():
            present = [member for member in members if self.members.has(member)]
            is_complete = all((kind, member) in self._answers for member in present)
            is_doomed = kind is WeightsReady and (
                self._has_broken(members) or reading.must_not_wait
            )
            remaining_s = deadline - time.monotonic()
            if is_complete or is_doomed or remaining_s <= 0:
                return
            self.receive(min(WAIT_S, remaining_s))

    def _has_broken(self, members: tuple[Member, ...]) -> bool:
        """Return whether this group cannot come together: somebody is gone, or has given up."""
        return any(
            not self.members.has(member) or (WeightsLoaded, member) in self._answers
            for member in members
        )

    def _is_cancelled(self, members: tuple[Member, ...], reading: Reading) -> bool:
        self.receive(0.0)
        is_over = self._stop_requested.is_set() or reading.must_end
        return is_over or any(self._has_failed(m) for m in members)

    def _has_failed(self, member: Member) -> bool:
        answer = self._answers.get((WeightsLoaded, member))
        return not self.members.has(member) or (answer is not None and not answer.is_ok)

    def _lane(self, wave: Wave) -> _Lane:
        """Return the wave's group; those of members that are gone are let go."""
        for other in list(self._lanes):
            if not all(self.members.has(member) for member in other.members):
                self._leave(other)
        if wave not in self._lanes:
            self._last_epoch += 1
            self._lanes[wave] = _Lane(self._last_epoch)
        return self._lanes[wave]

    def _leave(self, wave: Wave) -> None:
        lane = self._lanes.pop(wave, None)
        if lane is not None:
            lane.group.leave()
            self._left = [group for group in [*self._left, lane.group] if group.is_busy]
