"""The tensors of a version as flat bytes: read live from the policy's shards, or copied."""

import json
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from common.errors import LongstrideError, RankLost
from common.weights.buckets import lay_out
from common.weights.messages import TensorSpec
from learner.policy.expert_weights import Stored
from learner.policy.finite import WeightsNotFinite, first_not_finite
from learner.policy.merging import Merged
from learner.policy.sharding import device_of

# Numbers copied at a time between devices, to bound the memory for the cast.
CAST_NUMBERS = 16 << 20
# Bytes of a part that a GPU casts and checks at once, before one copy to the host.
STAGE_BYTES = 64 << 20


class WeightSource(Protocol):
    """Provides the bytes of a version."""

    specs: list[TensorSpec]
    total_bytes: int
    device: torch.device
    is_live: bool  # True if the optimizer's next update changes the weights.

    def fill(self, start: int, part: Tensor) -> None:
        """Write the flat bytes that begin at `start` to `part` [num_bytes] uint8, on any device."""
        ...

    def read(self, start: int, part: Tensor) -> None:
        """Write the bytes as `fill`, but leave the check of the numbers to `check`."""
        ...

    def check(self, start: int, part: Tensor) -> None:
        """Raise an error if `part`, which `read` wrote, must not be sent. For any thread."""
        ...


class Piece(NamedTuple):
    """A range of numbers of one weight, held by one rank, that a part contains."""

    weight: Tensor | Merged  # The weight, or this rank's shard of it.
    dtype: torch.dtype  # Dtype in which it is sent.
    is_rounded: bool  # True: its numbers are rounded to bf16 first.
    rank: int
    first: int  # Index of the first number in the flat whole weight.
    count: int
    at: int  # Byte offset in the part.


class Gathering(NamedTuple):
    """How the ranks gather a part: in a separate process group from training's collectives."""

    group: dist.ProcessGroup
    rank: int
    device: torch.device  # Device of the data that this rank sends and receives.
    ask: Callable[[bytes], object] | None = None  # On rank 0: asks the other ranks to serve a part.


class LiveWeights:
    """Reads named tensors, cast to the engine's dtype; it copies no more than one part.

    The tensors must not change while a part is read; see `WeightsLock`. With several ranks, rank 0
    fills the part, and the other ranks serve its requests.
    """

    is_live = True

    def __init__(
        self,
        named: Iterable[tuple[str, Tensor | Merged | Stored]],
        dtype: torch.dtype | None,
        *,
        exact: Collection[str] = (),
        rounded: Collection[str] = (),
        gathering: Gathering | None = None,
    ) -> None:
        """Wrap tensors: DTensors on a mesh [shard] or [copy, shard], plain ones, or ranges of both.

        Args:
            dtype: dtype in which floating-point tensors are sent; None: each in its own.
            exact: names of the tensors that are sent in their own dtype in any case.
            rounded: names of the tensors whose numbers are rounded to bf16 before any other cast.
        """
        named = list(named)
        layout = [
            (name, torch.empty(tensor.shape, dtype=sent_as, device="meta"))
            for name, tensor in named
            for sent_as in [_dtype_sent(tensor, None if name in exact else dtype)]
        ]
        self.specs, self.total_bytes = lay_out(layout)
        self._dtypes = [tensor.dtype for _, tensor in layout]
        self._runs = [_runs_of(tensor) for _, tensor in named]
        self._is_rounded = [name in rounded for name, _ in named]
        self._offsets = [spec.offset_bytes for spec in self.specs]
        self._gathering = gathering
        self._stage: Tensor | None = None  # [num_bytes] uint8 on the weights' device.
        self._filling = threading.Lock()  # An abandoned transfer may still be filling a part.
        # Tensors on a mesh of GPUs may be offloaded, but are sent from the GPU.
        first = self._runs[0][0][0]
        self.device = device_of(first.device_mesh) if isinstance(first, DTensor) else first.device

    def fill(self, start: int, part: Tensor) -> None:
        """Write the flat bytes that begin at `start` to `part`. Raises: as `read` and `check`."""
        self.read(start, part)
        self.check(start, part)

    def read(self, start: int, part: Tensor) -> None:
        """Write the flat bytes that begin at `start` to `part`, which `check` must check.

        Weights on a GPU are cast, checked and joined there; one copy brings the part to the host.

        Raises:
            LongstrideError: another rank is lost.
            WeightsNotFinite: as `check`, of weights on a GPU.
        """
        with self._filling:
            if not self._is_staged(part):
                self._fill(start, part)
                return
            for first in range(0, part.numel(), STAGE_BYTES):
                self._fill_by_stage(start + first, part[first : first + STAGE_BYTES])
            if part.is_pinned():  # Only copies to other memory have ended by now.
                torch.cuda.current_stream(self.device).synchronize()

    def check(self, start: int, part: Tensor) -> None:
        """Raise WeightsNotFinite for a part with NaN or infinity after the cast.

        The error names the tensor. The live weights are not read.
        """
        if not self._is_staged(part):
            self._check_finite(start, part)

    def _is_staged(self, part: Tensor) -> bool:
        """Return whether a part is filled by way of memory on the weights' device."""
        return part.device.type == "cpu" and self.device.type != "cpu"

    def _fill_by_stage(self, start: int, part: Tensor) -> None:
        """Begin to fill a part on the host by way of memory on the weights' device."""
        if self._stage is None:
            self._stage = torch.zeros(STAGE_BYTES, dtype=torch.uint8, device=self.device)
        made = self._stage[: part.numel()]
        self._fill(start, made)
        self._check_finite(start, made)
        part.copy_(made, non_blocking=True)

    def _check_finite(self, start: int, part: Tensor) -> None:
        """Raise WeightsNotFinite for a part with NaN or infinity."""
        names: list[str] = []
        numbers: list[Tensor] = []
        for index in self._within(start, part.numel()):
            spec = self.specs[index]
            first = max(start, spec.offset_bytes) - start
            stop = min(start + part.numel(), spec.offset_bytes + spec.num_bytes) - start
            if first < stop:
                names.append(spec.name)
                numbers.append(part[first:stop].view(self._dtypes[index]))
        bad = first_not_finite(numbers)
        if bad is not None:
            raise WeightsNotFinite(names[bad], "the weights are not sent to the engines")

    def _fill(self, start: int, part: Tensor) -> None:
        """Collect the bytes of a part from all ranks."""
        gathering = self._gathering
        if gathering is not None and gathering.ask is not None:
            gathering.ask(json.dumps([start, part.numel()]).encode())
        own = 0
        others = []
        for piece in self._pieces(start, part.numel()):
            target = part[piece.at : piece.at + piece.count * piece.dtype.itemsize].view(
                piece.dtype
            )
            if piece.rank == own:
                _copy(target, self._local(piece))
            else:
                others.append((piece, target))
        if others:
            assert gathering is not None
            _receive(gathering, others)

    def serve(self, request: bytes) -> None:
        """On a rank other than 0, send rank 0 the local numbers of the requested part."""
        gathering = self._gathering
        assert gathering is not None
        start, num_bytes = json.loads(request)
        sent: list[Tensor] = []
        for piece in self._pieces(start, num_bytes):
            if piece.rank == gathering.rank:
                numbers = self._local(piece).to(gathering.device, piece.dtype)
                sent.append(numbers.view(torch.uint8))
        with _RankErrors(gathering):
            _exchange([dist.P2POp(dist.isend, each, 0, gathering.group) for each in sent])

    def _within(self, start: int, num_bytes: int) -> range:
        """Return the indices of the tensors that may have bytes in this range."""
        first = max(bisect_right(self._offsets, start) - 1, 0)
        return range(first, bisect_left(self._offsets, start + num_bytes))

    def _pieces(self, start: int, num_bytes: int) -> Iterator[Piece]:
        """Yield the pieces in these bytes, in the same order on every rank."""
        for index in self._within(start, num_bytes):
            spec = self.specs[index]
            first_byte = max(start, spec.offset_bytes)
            stop_byte = min(start + num_bytes, spec.offset_bytes + spec.num_bytes)
            if first_byte >= stop_byte:
                continue
            dtype = self._dtypes[index]
            is_rounded = self._is_rounded[index]
            first = (first_byte - spec.offset_bytes) // dtype.itemsize
            stop = (stop_byte - spec.offset_bytes) // dtype.itemsize
            at = spec.offset_bytes - start  # Byte offset of the tensor's first number.
            for weight, offset, count in self._runs[index]:
                wanted = (offset + max(first, 0), offset + min(stop, count))
                for rank, (low, high) in enumerate(_shares(weight)):
                    begin = max(wanted[0], low)
                    end = min(wanted[1], high)
                    if begin < end:
                        place = at + (begin - offset) * dtype.itemsize
                        yield Piece(weight, dtype, is_rounded, rank, begin, end - begin, place)
                first -= count
                stop -= count
                at += count * dtype.itemsize

    def _local(self, piece: Piece) -> Tensor:
        """Return the numbers [count] of a piece that this rank holds, as they are sent."""
        numbers = self._masters(piece)
        return numbers.to(torch.bfloat16) if piece.is_rounded else numbers

    def _masters(self, piece: Piece) -> Tensor:
        """Return the numbers [count] of a piece as this rank holds them."""
        tensor = piece.weight
        if isinstance(tensor, Merged):
            return tensor.numbers()[piece.first : piece.first + piece.count]
        if isinstance(tensor, DTensor):
            low, _ = _shares(tensor)[piece.rank]
            flat = tensor.to_local().reshape(-1)
            return flat[piece.first - low : piece.first - low + piece.count]
        return tensor.reshape(-1)[piece.first : piece.first + piece.count]


def _runs_of(tensor: Tensor | Merged | Stored) -> Sequence[tuple[Tensor | Merged, int, int]]:
    """Return a tensor as ranges of flat tensors: (tensor, first, first after it)."""
    if isinstance(tensor, Stored):
        return tensor.runs
    if isinstance(tensor, Merged):
        return [(tensor, 0, tensor.numel())]
    return [(tensor.detach(), 0, tensor.numel())]


def _dtype_sent(tensor: Tensor | Merged | Stored, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a tensor is sent."""
    return dtype if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype


def _shares(tensor: Tensor | Merged) -> list[tuple[int, int]]:
    """Return the range of flat numbers that each rank holds: (first, first after it).

    If the ranks hold several copies, these are the ranks of the first copy.
    """
    if not isinstance(tensor, DTensor) or isinstance(tensor.placements[-1], Replicate):
        return [(0, tensor.numel())]
    if tensor.placements not in ((Shard(0),), (Replicate(), Shard(0))):
        raise LongstrideError(
            f"weights that are sharded as {tensor.placements} cannot be published"
        )
    rows = tensor.shape[0]
    num_ranks = tensor.device_mesh.size(-1)
    # Each rank holds the rows that `torch.chunk` assigns to it.
    width = tensor.numel() // max(rows, 1)
    step = -(-rows // num_ranks)
    bounds = [min(rank * step, rows) * width for rank in range(num_ranks + 1)]
    return list(pairwise(bounds))


def _copy(target: Tensor, source: Tensor) -> None:
    """Copy and cast, on the GPU; between devices in slices, to bound the memory for the cast."""
    if target.device == source.device:
        target.copy_(source)
        return
    targets = target.split(CAST_NUMBERS)
    for part, found in zip(targets, source.split(CAST_NUMBERS), strict=True):
        part.copy_(found.to(part.device) if part.is_cuda else found)


def _receive(gathering: Gathering, wanted: Sequence[tuple[Piece, Tensor]]) -> None:
    """Fill the targets with data of other ranks, without an extra copy if the devices allow it."""
    landed = [
        target if target.device == gathering.device else torch.empty_like(target, device=device)
        for _, target in wanted
        for device in [gathering.device]
    ]
    with _RankErrors(gathering):
        _exchange(
            [
                dist.P2POp(dist.irecv, each.view(torch.uint8), piece.rank, gathering.group)
                for (piece, _), each in zip(wanted, landed, strict=True)
            ]
        )
    for (_, target), each in zip(wanted, landed, strict=True):
        if each is not target:
            target.copy_(each)


def _exchange(operations: list[dist.P2POp]) -> None:
    """Run transfers between ranks to their end."""
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()


class _RankErrors:
    """Adds the rank to an error of a joint operation of ranks."""

    def __init__(self, gathering: Gathering) -> None:
        self._rank = gathering.rank

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            reason = " ".join(str(error).split())[:300]
            raise RankLost(
                f"learner rank {self._rank} lost the connection to another rank while it gathered"
                f" weights: {reason}"
            ) from error


class CopiedWeights:
    """A copy of a version in one flat buffer, for versions needed after the live weights change."""

    is_live = False

    def __init__(self, specs: list[TensorSpec], buffer: Tensor) -> None:
        """Wrap `buffer` [total_bytes] uint8."""
        self.specs = specs
        self.buffer = buffer
        self.total_bytes = buffer.numel()
        self.device = buffer.device

    def fill(self, start: int, part: Tensor) -> None:
        """Copy the flat bytes that begin at `start` to `part`."""
        part.copy_(self.buffer[start : start + part.numel()])

    read = fill

    def check(self, start: int, part: Tensor) -> None:
        """Check nothing, because the bytes were checked when they were copied."""


def copied(source: WeightSource) -> CopiedWeights:
    """Return a copy of a whole source, in host memory."""
    buffer = torch.zeros(source.total_bytes, dtype=torch.uint8)
    source.fill(0, buffer)
    return CopiedWeights(source.specs, buffer)
