"""Transfer of a version in buckets: the next one is filled while one is sent, each has a digest."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import xxhash
from torch import Tensor

from common.errors import WeightSyncError
from common.text import counted
from common.wire.transfer.digest import DIGEST_BYTES, add_bytes, digest, hexadecimal
from common.wire.weight_messages import TensorSpec

NUM_SLOTS = 2  # Number of buckets in transit at once.


class BucketDamaged(WeightSyncError):
    """The received bytes of a bucket differ from the sent bytes."""


class Pending(Protocol):
    """A part in transit."""

    def wait(self) -> None:
        """Wait until the part has arrived. Raises: WeightSyncError: the transfer failed."""
        ...


class Channel(Protocol):
    """Carries parts of a version from one sender to all receivers, in order.

    On a GPU `wait` may return early, if later work on the current stream runs after the transfer.
    """

    device: torch.device  # Device of the parts.

    def send(self, index: int, part: Tensor) -> Pending:
        """Begin to send part number `index` [num_bytes] uint8. It must not change until `wait`."""
        ...

    def receive(self, index: int, part: Tensor) -> Pending:
        """Begin to fill `part` [num_bytes] uint8 with part number `index`."""
        ...


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """Division of the flat bytes of a version into buckets. A tensor may span several buckets."""

    total_bytes: int
    bucket_bytes: int  # Bucket size, a multiple of the alignment of tensors.

    @property
    def num(self) -> int:
        """Number of buckets."""
        return -(-self.total_bytes // self.bucket_bytes)

    @property
    def slot_bytes(self) -> int:
        """Size of the largest bucket."""
        return min(self.bucket_bytes, self.total_bytes)

    def span(self, index: int) -> tuple[int, int]:
        """Return the offset of a bucket's first byte and of the first byte after it."""
        start = index * self.bucket_bytes
        return start, min(start + self.bucket_bytes, self.total_bytes)


def send_buckets(
    channel: Channel,
    cut: BucketLayout,
    slots: Sequence[Tensor],
    fill: Callable[[int, Tensor], object],
) -> None:
    """Send a version. No other code may use the slots during the call.

    Args:
        slots: two tensors [slot_bytes] uint8 on the channel's device.
        fill: writes a bucket. Its arguments are the offset of the bucket's first byte and the
            part [num_bytes] uint8 to write to.

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


def write_buckets(
    target: Tensor,
    cut: BucketLayout,
    slots: Sequence[Tensor],
    fill: Callable[[int, Tensor], object],
) -> str:
    """Write a version to host memory `target` [total_bytes] uint8; return its `checksum`.

    A bucket is hashed, in a thread of its own, while the next one is filled.

    Args:
        slots: two tensors [slot_bytes] uint8 that are filled and then copied, as pinned memory for
            weights of a GPU; [] fills the target.
        fill: as for `send_buckets`.
    """
    hashed = xxhash.xxh3_128()

    def finish(part: Tensor, there: Tensor) -> None:
        """Copy a filled bucket to its place unless it is there, and hash it."""
        if part is not there:
            there.copy_(part)
        add_bytes(hashed, there)

    under_way: deque[Future[None]] = deque()
    with ThreadPoolExecutor(1) as thread:
        for index in range(cut.num):
            if len(under_way) == NUM_SLOTS:
                under_way.popleft().result()
            start, stop = cut.span(index)
            there = target[start:stop]
            part = slots[index % NUM_SLOTS][: stop - start] if slots else there
            fill(start, part)
            under_way.append(thread.submit(finish, part, there))
        for pending in under_way:
            pending.result()
    return hashed.hexdigest()


def receive_buckets(
    channel: Channel, cut: BucketLayout, staging: Tensor, specs: Sequence[TensorSpec]
) -> None:
    """Fill `staging` [total_bytes] uint8 and check every bucket while the next one arrives.

    If `staging` is on another device than the channel, two buckets on the channel's device buffer
    the parts.

    Raises:
        BucketDamaged: a bucket differs from the sent one. The error names the first such bucket.
        WeightSyncError: the transfer failed.
    """
    is_direct = staging.device == channel.device
    slots = [] if is_direct else _slots(channel, cut, is_pinned=staging.is_cuda)

    def target_of(index: int) -> Tensor:
        """Return the memory into which a bucket is received."""
        start, stop = cut.span(index)
        return staging[start:stop] if is_direct else slots[index % NUM_SLOTS][: stop - start]

    digests = torch.zeros((cut.num, DIGEST_BYTES), dtype=torch.uint8, device=channel.device)
    sent = torch.zeros_like(digests)
    coming = channel.receive(0, target_of(0)) if cut.num else None
    for index in range(cut.num):
        assert coming is not None
        arriving = coming
        if index + 1 < cut.num:
            coming = channel.receive(index + 1, target_of(index + 1))
        arriving.wait()
        part = target_of(index)
        digests[index] = digest(part)
        if not is_direct:
            start, stop = cut.span(index)
            staging[start:stop].copy_(part)
    channel.receive(cut.num, sent.view(-1)).wait()
    _synchronize(channel)
    _compare(cut, digests.cpu(), sent.cpu(), specs)


def _slots(channel: Channel, cut: BucketLayout, *, is_pinned: bool) -> list[Tensor]:
    """Return two buckets; a GPU reads pinned memory of the host several times faster."""
    device = channel.device
    is_pinned = is_pinned and device.type == "cpu"
    kind: Any = {"dtype": torch.uint8, "device": device, "pin_memory": is_pinned}
    return [torch.zeros(cut.slot_bytes, **kind) for _ in range(NUM_SLOTS)]


def _synchronize(channel: Channel) -> None:
    """Wait until the GPU has finished the current stream's work."""
    if channel.device.type == "cuda":
        torch.cuda.current_stream(channel.device).synchronize()


def _compare(cut: BucketLayout, found: Tensor, sent: Tensor, specs: Sequence[TensorSpec]) -> None:
    """Check the digests of all buckets. Raises: BucketDamaged, with the tensors."""
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
        f"is not the sender's {hexadecimal(sent[index])};"
        f" {counted(len(damaged), 'bucket is', 'buckets are')} damaged"
    )
