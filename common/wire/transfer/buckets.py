"""One version in buckets: one is filled while the one before is sent, each has its digest."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from common.errors import WeightSyncError
from common.wire.transfer.digest import DIGEST_BYTES, digest, hexadecimal
from common.wire.weight_messages import TensorSpec

NUM_SLOTS = 2  # buckets on their way at once


class BucketDamaged(WeightSyncError):
    """What arrived is not what was sent."""


class Pending(Protocol):
    """A part on its way."""

    def wait(self) -> None:
        """Return when it is there. Raises: WeightSyncError: it will not be."""
        ...


class Channel(Protocol):
    """Carries parts of a version from one sender to all receivers, in order.

    On a GPU `wait` may return as soon as what follows on the current stream is in order.
    """

    device: torch.device  # of the parts

    def send(self, index: int, part: Tensor) -> Pending:
        """Begin to send part number `index` [num_bytes] uint8, which stays as it is until then."""
        ...

    def receive(self, index: int, part: Tensor) -> Pending:
        """Begin to fill `part` [num_bytes] uint8 with part number `index`."""
        ...


@dataclass(frozen=True, slots=True)
class Cut:
    """Where the flat bytes of a version are cut; tensors may lie across cuts."""

    total_bytes: int
    bucket_bytes: int  # a multiple of the alignment of tensors

    @property
    def num(self) -> int:
        """The number of buckets."""
        return -(-self.total_bytes // self.bucket_bytes)

    @property
    def slot_bytes(self) -> int:
        """The size of the largest bucket."""
        return min(self.bucket_bytes, self.total_bytes)

    def span(self, index: int) -> tuple[int, int]:
        """Return the first byte of a bucket and the first after it."""
        start = index * self.bucket_bytes
        return start, min(start + self.bucket_bytes, self.total_bytes)


def send_buckets(
    channel: Channel, cut: Cut, slots: Sequence[Tensor], fill: Callable[[int, Tensor], object]
) -> None:
    """Send a version. What is in the slots while this runs is nobody else's.

    Args:
        slots: two tensors [slot_bytes] uint8 on the channel's device.
        fill: called with the first byte of a bucket and the part [num_bytes] uint8 to write it to.

    Raises: WeightSyncError: the transfer failed.
    """
    table = torch.zeros((cut.num, DIGEST_BYTES), dtype=torch.uint8, device=channel.device)
    under_way: deque[Pending] = deque()
    for index in range(cut.num):
        if len(under_way) == NUM_SLOTS:
            under_way.popleft().wait()
        start, stop = cut.span(index)
        part = slots[index % NUM_SLOTS][: stop - start]
        fill(start, part)
        table[index] = digest(part)
        under_way.append(channel.send(index, part))
    under_way.append(channel.send(cut.num, table.view(-1)))
    for pending in under_way:
        pending.wait()
    _synchronize(channel)


def receive_buckets(
    channel: Channel, cut: Cut, staging: Tensor, specs: Sequence[TensorSpec]
) -> None:
    """Fill `staging` [total_bytes] uint8 and check every bucket while the next one arrives.

    Where `staging` is not on the channel's device, two buckets are there beside it.

    Raises:
        BucketDamaged: names the buckets that are not what was sent.
        WeightSyncError: the transfer failed.
    """
    is_direct = staging.device == channel.device
    slots = [] if is_direct else _slots(channel, cut)

    def landing(index: int) -> Tensor:
        start, stop = cut.span(index)
        return staging[start:stop] if is_direct else slots[index % NUM_SLOTS][: stop - start]

    digests = torch.zeros((cut.num, DIGEST_BYTES), dtype=torch.uint8, device=channel.device)
    sent = torch.zeros_like(digests)
    coming = channel.receive(0, landing(0)) if cut.num else None
    for index in range(cut.num):
        assert coming is not None
        arriving = coming
        if index + 1 < cut.num:
            coming = channel.receive(index + 1, landing(index + 1))
        arriving.wait()
        part = landing(index)
        digests[index] = digest(part)
        if not is_direct:
            start, stop = cut.span(index)
            staging[start:stop].copy_(part)
    channel.receive(cut.num, sent.view(-1)).wait()
    _synchronize(channel)
    _compare(cut, digests.cpu(), sent.cpu(), specs)


def _slots(channel: Channel, cut: Cut) -> list[Tensor]:
    make = torch.zeros
    return [
        make(cut.slot_bytes, dtype=torch.uint8, device=channel.device) for _ in range(NUM_SLOTS)
    ]


def _synchronize(channel: Channel) -> None:
    if channel.device.type == "cuda":
        torch.cuda.current_stream(channel.device).synchronize()


def _compare(cut: Cut, found: Tensor, sent: Tensor, specs: Sequence[TensorSpec]) -> None:
    damaged = [i for i in range(cut.num) if not torch.equal(found[i], sent[i])]
    if not damaged:
        return
    index = damaged[0]
    start, stop = cut.span(index)
    names = [
        s.name for s in specs if s.offset_bytes < stop and start < s.offset_bytes + s.num_bytes
    ]
    within = f" ({names[0]} to {names[-1]})" if names else ""
    raise BucketDamaged(
        f"bucket {index} of {cut.num}{within} is damaged: checksum {hexadecimal(found[index])} "
        f"is not the sender's {hexadecimal(sent[index])}; {len(damaged)} damaged in all"
    )
