"""The process groups of the weight plane, reused from version to version."""

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from common.weights.buckets import NUM_SLOTS
from common.weights.messages import WeightsOffer
from common.weights.transport import WeightGroup
from learner.weights.receivers import EngineMember
from learner.weights.routes import ReceiverGroup

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class TransferGroup:
    """The process group of the engines that receive together."""

    epoch: int
    key: str  # Secret name of the group in the rendezvous.
    group: WeightGroup = field(default_factory=WeightGroup)


class TransferGroups:
    """One process group for each set of engines that receive together.

    An engine is in one group at a time: a new group ends its older ones.
    """

    def __init__(self, open_group: Callable[[], str]) -> None:
        """Start without groups; `open_group` returns the secret name of a new group."""
        self._open_group = open_group
        self._groups: dict[ReceiverGroup, TransferGroup] = {}
        self._left: list[WeightGroup] = []
        # Random, so that it differs from the epochs of an earlier learner.
        self._last_epoch = secrets.randbelow(1 << 31)
        self._slots: list[Tensor] = []  # Two buckets, on the device that sends.

    def of(
        self, receivers: ReceiverGroup, *, is_present: Callable[[EngineMember], bool]
    ) -> TransferGroup:
        """Return the group of these receivers.

        Groups that share a member with these receivers, or that have a lost member, are closed.
        """
        for other in list(self._groups):
            is_shared = other != receivers and not set(other.members).isdisjoint(receivers.members)
            if is_shared or not all(is_present(member) for member in other.members):
                self.leave(other)
        if receivers not in self._groups:
            self._last_epoch += 1
            self._groups[receivers] = TransferGroup(self._last_epoch, self._open_group())
            names = ", ".join(member.actor for member in receivers.members)
            logger.info(
                "engines receive together transport=%s actors=%s", receivers.transport, names
            )
        return self._groups[receivers]

    def leave(self, receivers: ReceiverGroup) -> None:
        """Close the group of these receivers; any thread that waits in it fails now."""
        transfer_group = self._groups.pop(receivers, None)
        if transfer_group is not None:
            transfer_group.group.leave()
            self._left = [group for group in [*self._left, transfer_group.group] if group.is_busy]

    def slots(self, offer: WeightsOffer, device: torch.device) -> list[Tensor]:
        """Return the two buckets to send from; they are reused, because allocation is slow."""
        place = device if offer.transport in ("nccl", "ipc") else torch.device("cpu")
        size = min(offer.bucket_bytes, offer.total_bytes)
        if not self._slots or self._slots[0].device != place or self._slots[0].numel() < size:
            self._slots = []
            is_pinned = device.type == "cuda" and place.type == "cpu"
            make = {"dtype": torch.uint8, "device": place, "pin_memory": is_pinned}
            self._slots = [torch.zeros(size, **make) for _ in range(NUM_SLOTS)]
        return self._slots

    def drop_slots(self) -> None:
        """Allocate new buckets next time: an abandoned transfer may still write to these."""
        self._slots = []

    def leave_all(self) -> list[WeightGroup]:
        """Close every group; return the groups whose threads may still run."""
        groups = [*self._left, *(each.group for each in self._groups.values())]
        for group in groups:
            group.leave()
        self._slots = []
        return groups


def join_all(groups: list[WeightGroup], *, timeout_s: float) -> None:
    """Wait for the threads of closed groups, after the store of the groups is closed."""
    deadline = time.monotonic() + timeout_s
    for group in groups:
        group.join(timeout_s=max(0.0, deadline - time.monotonic()))
