"""The flat bytes of a version: the layout of its tensors, digests, and the transfer in buckets.

The next bucket is filled while one is sent, and each has a digest. Buckets on a CPU are filled in
pieces. A thread checks and hashes a piece, which is still in the CPU's cache, while the next piece
is filled.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import xxhash
from torch import Tensor

from common.errors import WeightSyncError
from common.host.cgroups import num_cores
from common.text import counted
from common.weights.messages import TensorSpec, WeightsOffer

CPU = torch.device("cpu")
ALIGN_BYTES = 16  # Every tensor starts at a multiple of this, so a view of any dtype is legal.
DIGEST_BYTES = 16
PIECE_BYTES = 16 << 20  # A thread checks this many bytes of a version at a time.
MAX_THREADS = 4  # Threads that check a version, at most one for each core.
ROW_WORDS = 4096  # Row length of the int64 matrix whose rows and columns a GPU sums.
NUM_SLOTS = 2  # Number of buckets in transit at once.
MAX_PIECES = 4  # Most filled pieces that wait for their check, if each has memory of its own.

# A function of the offset of a part in the version, and of the part [num_bytes] uint8.
OnPart = Callable[[int, Tensor], object]


def digest(buffer: Tensor) -> Tensor:
    """Return the digest [16] uint8 of `buffer` [num_bytes] uint8, on its device.

    On a CPU it is XXH3. On a GPU it is two wrapping 64-bit sums over the 64-bit words, one plain
    and one weighted by position, without synchronization. Neither is cryptographic.
    """
    if buffer.device.type != "cpu":
        return word_sums(buffer).view(torch.uint8)
    return torch.frombuffer(bytearray(xxhash.xxh3_128_digest(bytes_of(buffer))), dtype=torch.uint8)


def word_sums(buffer: Tensor) -> Tensor:
    """Return the plain and the position-weighted sum [2] int64 of `buffer` [num_bytes] uint8.

    The words have 64 bits. A last word of fewer than 8 bytes is padded with zeros.
    """
    num_whole = buffer.numel() // 8 * 8
    words = buffer[:num_whole].view(torch.int64)
    if num_whole < buffer.numel():
        rest = buffer.new_zeros(8)
        rest[: buffer.numel() - num_whole] = buffer[num_whole:]
        words = torch.cat([words, rest.view(torch.int64)])
    num_rows = words.numel() // ROW_WORDS
    matrix = words[: num_rows * ROW_WORDS].view(num_rows, ROW_WORDS)
    tail = words[num_rows * ROW_WORDS :]
    position = torch.arange(max(ROW_WORDS, num_rows), device=buffer.device) + 1
    row_sums = matrix.sum(1)  # [rows]
    by_row = (row_sums * position[:num_rows]).sum() * ROW_WORDS
    by_column = (matrix.sum(0) * position[:ROW_WORDS]).sum()
    tail_place = position[: tail.numel()] + (num_rows + 1) * ROW_WORDS
    by_tail = (tail * tail_place).sum()
    return torch.stack([row_sums.sum() + tail.sum(), by_row + by_column + by_tail])


def hexadecimal(value: Tensor) -> str:
    """Return a digest [16] uint8 as hexadecimal text."""
    return bytes(cast(list[int], value.tolist())).hex()  # pyright: ignore[reportUnknownMemberType]


class Checksum:
    """The checksum of bytes that come in order: XXH3 of the XXH3 digests of pieces.

    Threads can hash the pieces of a complete buffer at the same time: see `checksum`.
    """

    def __init__(self) -> None:
        self._pieces: list[xxhash.xxh3_128] = []
        self._num_bytes = 0

    def update(self, view: memoryview) -> None:
        """Add the next bytes."""
        while view:
            num_begun = self._num_bytes % PIECE_BYTES
            if num_begun == 0:
                self._pieces.append(xxhash.xxh3_128())
            part = view[: PIECE_BYTES - num_begun]
            self._pieces[-1].update(part)
            self._num_bytes += len(part)
            view = view[len(part) :]

    def text(self) -> str:
        """Return the checksum of all bytes so far, as hexadecimal text."""
        return _joined(each.digest() for each in self._pieces)


def checksum(buffer: Tensor) -> str:
    """Return the `Checksum` of `buffer` [num_bytes] uint8 on a CPU. Several threads compute it."""
    view = bytes_of(buffer)
    pieces = [view[at : at + PIECE_BYTES] for at in range(0, len(view), PIECE_BYTES)]
    with ThreadPoolExecutor(min(MAX_THREADS, num_cores())) as threads:
        return _joined(threads.map(xxhash.xxh3_128_digest, pieces))


def bytes_of(buffer: Tensor) -> memoryview:
    """Return the bytes of `buffer` [num_bytes] uint8 on a CPU, without a copy."""
    return memoryview(cast(Any, buffer.numpy()))


def _joined(digests: Iterable[bytes]) -> str:
    return xxhash.xxh3_128_hexdigest(b"".join(digests))


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


def unchecked(start: int, part: Tensor) -> None:
    """Check nothing, as if `fill` had checked the part."""


class _Pieces:
    """Fills pieces on a CPU. A thread checks and hashes each one while the next one is filled.

    At most `limit` pieces are in the thread, so that `add` may use memory again after as many.
    """

    def __init__(
        self,
        fill: OnPart,
        check: OnPart,
        thread: ThreadPoolExecutor,
        hashed: xxhash.xxh3_128 | Checksum,
        *,
        limit: int = MAX_PIECES,
    ) -> None:
        self._fill = fill
        self._check = check
        self._thread = thread
        self._hashed = hashed
        self._limit = limit
        self._under_way: deque[Future[None]] = deque()

    def add(self, start: int, piece: Tensor, target: Tensor) -> None:
        """Fill a piece; begin to check it, copy it to `target` unless that is it, and hash it.

        Raises: errors of `fill`, and of `check` for earlier pieces.
        """
        if len(self._under_way) == self._limit:
            self._under_way.popleft().result()
        self._fill(start, piece)
        self._under_way.append(self._thread.submit(self._finish, start, piece, target))

    def _finish(self, start: int, piece: Tensor, target: Tensor) -> None:
        self._check(start, piece)
        if piece is not target:
            target.copy_(piece)
        self._hashed.update(bytes_of(target))

    def finish(self) -> None:
        """Wait until all pieces are hashed. Raises: errors of `check`."""
        while self._under_way:
            self._under_way.popleft().result()


def send_buckets(
    channel: Channel,
    cut: BucketLayout,
    slots: Sequence[Tensor],
    fill: OnPart,
    *,
    check: OnPart = unchecked,
) -> None:
    """Send a version. No other code may use the slots during the call.

    Args:
        slots: two tensors [slot_bytes] uint8 on the channel's device.
        fill: writes a part of the version.
        check: raises an error if a filled part must not be sent. On a CPU it runs in a thread.

    Raises: WeightSyncError: the transfer failed.
    """
    table = torch.zeros((cut.num, DIGEST_BYTES), dtype=torch.uint8, device=channel.device)
    under_way: deque[Pending] = deque()
    with ThreadPoolExecutor(1) as thread:
        for index in range(cut.num):
            if len(under_way) == NUM_SLOTS:
                under_way.popleft().wait()
            start, stop = cut.span(index)
            part = slots[index % NUM_SLOTS][: stop - start]
            if channel.device.type == "cpu":
                hashed = xxhash.xxh3_128()
                pieces = _Pieces(fill, check, thread, hashed)
                for at in range(0, stop - start, PIECE_BYTES):
                    piece = part[at : at + PIECE_BYTES]
                    pieces.add(start + at, piece, piece)
                pieces.finish()
                table[index] = torch.frombuffer(bytearray(hashed.digest()), dtype=torch.uint8)
            else:
                fill(start, part)
                check(start, part)
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
    fill: OnPart,
    *,
    check: OnPart = unchecked,
) -> str:
    """Write a version to host memory `target` [total_bytes] uint8; return its `checksum`.

    Args:
        slots: two tensors [slot_bytes] uint8 that are filled and then copied, as pinned memory for
            weights of a GPU; [] fills the target.
        fill, check: as for `send_buckets`.
    """
    cut = BucketLayout(cut.total_bytes, min(cut.bucket_bytes, PIECE_BYTES))
    hashed = Checksum()
    with ThreadPoolExecutor(1) as thread:
        limit = len(slots) or MAX_PIECES
        pieces = _Pieces(fill, check, thread, hashed, limit=limit)
        for index in range(cut.num):
            start, stop = cut.span(index)
            there = target[start:stop]
            part = slots[index % NUM_SLOTS][: stop - start] if slots else there
            pieces.add(start, part, there)
        pieces.finish()
    return hashed.text()


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
    return [
        torch.zeros(cut.slot_bytes, dtype=torch.uint8, device=device, pin_memory=is_pinned)
        for _ in range(NUM_SLOTS)
    ]


def _synchronize(channel: Channel) -> None:
    """Wait until the GPU has finished the current stream's work."""
    if channel.device.type == "cuda":
        torch.cuda.current_stream(channel.device).synchronize()


def _compare(
    cut: BucketLayout, received: Tensor, sent: Tensor, specs: Sequence[TensorSpec]
) -> None:
    """Check the digests of all buckets. Raises: BucketDamaged, with the tensors."""
    damaged = [i for i in range(cut.num) if not torch.equal(received[i], sent[i])]
    if not damaged:
        return
    index = damaged[0]
    start, stop = cut.span(index)
    names = [
        s.name for s in specs if s.offset_bytes < stop and start < s.offset_bytes + s.num_bytes
    ]
    within = f" ({names[0]} to {names[-1]})" if names else ""
    raise BucketDamaged(
        f"bucket {index} of {cut.num}{within} is damaged: checksum {hexadecimal(received[index])} "
        f"is not the sender's {hexadecimal(sent[index])};"
        f" {counted(len(damaged), 'bucket is', 'buckets are')} damaged"
    )


def lay_out(tensors: Iterable[tuple[str, Tensor]]) -> tuple[list[TensorSpec], int]:
    """Return the position of each tensor in the flat buffer, and the buffer's size in bytes."""
    specs: list[TensorSpec] = []
    offset = 0
    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        specs.append(
            TensorSpec(
                name=name,
                shape=list(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                offset_bytes=offset,
                num_bytes=num_bytes,
            )
        )
        offset += aligned(num_bytes)
    return specs, offset


def check_layout(offer: WeightsOffer) -> None:
    """Check the sizes and positions in an offer. Raises: WeightSyncError: one is invalid."""
    if offer.bucket_bytes < 1 or not 0 <= offer.rank <= offer.world_size:
        raise WeightSyncError(
            f"offer of version {offer.version}: buckets of {offer.bucket_bytes} bytes, rank"
            f" {offer.rank} of {offer.world_size}"
        )
    end = 0
    for spec in offer.tensors:
        dtype = getattr(torch, spec.dtype, None)
        is_there = spec.offset_bytes >= end and spec.offset_bytes % ALIGN_BYTES == 0
        if (
            not isinstance(dtype, torch.dtype)
            or min(spec.shape, default=0) < 0
            or spec.num_bytes != math.prod(spec.shape) * dtype.itemsize
            or not is_there
        ):
            raise WeightSyncError(f"offer of version {offer.version}: impossible tensor {spec}")
        end = spec.offset_bytes + spec.num_bytes
    if not offer.tensors or (offer.base < 0 and end > offer.total_bytes):
        raise WeightSyncError(
            f"offer of version {offer.version}: tensors of {end} bytes in {offer.total_bytes}"
        )


def aligned(num_bytes: int) -> int:
    """Return the number of bytes, rounded up to the alignment of tensors."""
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def views(buffer: Tensor, specs: list[TensorSpec]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) views into `buffer` [num_bytes] uint8, without a copy."""
    for spec in specs:
        part = buffer[spec.offset_bytes : spec.offset_bytes + spec.num_bytes]
        yield spec.name, part.view(getattr(torch, spec.dtype)).view(spec.shape)
