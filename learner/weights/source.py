"""Versions of the policy as flat bytes: read live from its shards, or copied.

The numbers are those that the learner's forward pass uses, in the engines' dtype. A pass in bf16
rounds its weights, so an engine in fp32 receives rounded numbers, too. Otherwise it would follow
updates that the pass does not see. An engine in a coarser dtype than the pass rounds once more.
Some tensors stay in fp32, although the engines' dtype is bf16 or fp16.

vLLM (0.32) keeps some tensors in fp32 in every engine: the weights of many routers, the correction
of their choice, and the decay rates and convolutions of recurrent layers. An engine casts those
that it keeps in its own dtype, as from a checkpoint in fp32.
"""

import json
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel

from common.errors import LongstrideError, RankLost
from common.weights.buckets import lay_out, word_sums
from common.weights.delta import DeltaPacker, sums_text
from common.weights.messages import TensorSpec
from learner.policy.expert_weights import Stored
from learner.policy.finite import WeightsNotFinite, first_not_finite
from learner.policy.lora import adapts_experts, has_adapters
from learner.policy.merging import Merged
from learner.policy.model import published_tensors
from learner.policy.precision import exact_names, rounded_names
from learner.policy.sharding import device_of

# Numbers copied at a time between devices, to bound the memory for the cast.
CAST_NUMBERS = 16 << 20
# Bytes of a part that a GPU casts and checks at once, before one copy to the host.
STAGE_BYTES = 64 << 20
READ_BYTES = 16 << 20  # Bytes that are read from the live weights at a time.
MAX_FRAC = 0.5  # A delta above this share of the version's bytes is not sent.


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
    is_rounded: bool  # True: its numbers are first rounded to those of the learner's pass.
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
        pass_dtype: torch.dtype = torch.float32,
        gathering: Gathering | None = None,
    ) -> None:
        """Wrap tensors: DTensors on a mesh [shard] or [copy, shard], plain ones, or ranges of both.

        Args:
            dtype: dtype in which floating-point tensors are sent; None: each in its own.
            exact: names of the tensors that are sent in their own dtype in any case.
            rounded: names of the tensors whose numbers are rounded to `pass_dtype` before any other
                cast.
            pass_dtype: dtype of the learner's forward pass.
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
        self._pass_dtype = pass_dtype
        self._offsets = [spec.offset_bytes for spec in self.specs]
        self._gathering = gathering
        self._stage: Tensor | None = None  # [num_bytes] uint8 on the weights' device.
        self._filling = threading.Lock()  # An abandoned transfer may still be filling a part.
        # Tensors on a mesh of GPUs may be offloaded, but are sent from the GPU.
        first = _tensor_of(self._runs[0][0][0])
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
        this_rank = 0
        others = []
        for piece in self._gathered(start, part.numel()):
            target = part[piece.at : piece.at + piece.count * piece.dtype.itemsize].view(
                piece.dtype
            )
            if piece.rank == this_rank:
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
        for piece in self._gathered(start, num_bytes):
            if piece.rank == gathering.rank:
                numbers = self._local(piece).to(gathering.device, piece.dtype)
                sent.append(numbers.view(torch.uint8))
        with _RankErrors(gathering):
            _exchange([dist.P2POp(dist.isend, numbers, 0, gathering.group) for numbers in sent])

    def _within(self, start: int, num_bytes: int) -> range:
        """Return the indices of the tensors that may have bytes in this range."""
        first = max(bisect_right(self._offsets, start) - 1, 0)
        return range(first, bisect_left(self._offsets, start + num_bytes))

    def _gathered(self, start: int, num_bytes: int) -> Iterator[Piece]:
        """Yield the pieces in these bytes; before each merged weight, gather its factors."""
        last: Tensor | Merged | None = None
        for piece in self._pieces(start, num_bytes):
            weight = piece.weight
            if self._gathering is not None and isinstance(weight, Merged) and weight is not last:
                weight.gather(partial(_whole, self._gathering))
            last = weight
            yield piece

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
        return numbers.to(self._pass_dtype) if piece.is_rounded else numbers

    def _masters(self, piece: Piece) -> Tensor:
        """Return the numbers [count] of a piece as this rank holds them."""
        tensor = piece.weight
        low, _ = _shares(tensor)[piece.rank]
        if isinstance(tensor, Merged):
            flat = tensor.numbers()
        else:
            flat = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).reshape(-1)
        return flat[piece.first - low : piece.first - low + piece.count]


def _tensor_of(weight: Tensor | Merged) -> Tensor:
    return weight.weight if isinstance(weight, Merged) else weight


def _whole(gathering: Gathering, shard: Tensor) -> Tensor:
    """Return the whole of a tensor that the ranks shard by rows; all of them call it together."""
    if not isinstance(shard, DTensor):
        return shard
    num_ranks = shard.device_mesh.size(-1)  # Those of the first copy come first.
    sent = torch.zeros(-(-len(shard) // num_ranks), *shard.shape[1:], dtype=shard.dtype)
    sent = sent.to(gathering.device)
    local = shard.to_local()
    sent[: len(local)] = local
    parts = [torch.empty_like(sent) for _ in range(gathering.group.size())]
    with _RankErrors(gathering):
        dist.all_gather(parts, sent, group=gathering.group)
    return torch.cat(parts[:num_ranks])[: len(shard)].to(local.device)


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
    tensor = _tensor_of(tensor)
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
    for part, numbers in zip(targets, source.split(CAST_NUMBERS), strict=True):
        part.copy_(numbers.to(part.device) if part.is_cuda else numbers)


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
                dist.P2POp(dist.irecv, memory.view(torch.uint8), piece.rank, gathering.group)
                for (piece, _), memory in zip(wanted, landed, strict=True)
            ]
        )
    for (_, target), memory in zip(wanted, landed, strict=True):
        if memory is not target:
            target.copy_(memory)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedWeights:
    """One version, and the canaries that show whether an engine has loaded it.

    Canaries should leave out tokens that no policy sampled. Their logprobs have a huge absolute
    value, so rounding errors dominate the difference.
    """

    version: int
    source: WeightSource
    # The version whose holders turn the source's bytes, which are a delta, into this one; -1: the
    # source has the whole version.
    base: int = -1
    digest: str = ""  # Digest of the whole version for engines that keep a copy; "": none does.
    canary_token_ids: list[list[int]] = field(default_factory=list)
    # [canary, seq-1] nats, of the trainer.
    canary_logprobs: list[list[float]] = field(default_factory=list)
    # [canary, seq-1]; empty: all True.
    canary_masks: list[list[bool]] = field(default_factory=list)

    @property
    def tensors(self) -> list[TensorSpec]:
        """Position of each tensor in the flat bytes."""
        return self.source.specs

    @property
    def masks(self) -> list[list[bool]]:
        """Return True on the canary tokens to compare, [canary, seq-1]."""
        return self.canary_masks or [[True] * len(row) for row in self.canary_logprobs]


def policy_weights(
    model: PreTrainedModel,
    dtype: torch.dtype,
    *,
    pass_dtype: torch.dtype = torch.float32,
    gathering: Gathering | None = None,
) -> LiveWeights:
    """Return a policy's tensors as engines of this dtype receive them.

    Args:
        pass_dtype: dtype of the learner's forward pass.

    Raises: ConfigError: as `published_tensors`.
    """
    named = list(published_tensors(model))
    shapes = {name: tensor.shape for name, tensor in named}
    is_whole = not has_adapters(model) or adapts_experts(model)
    exact = exact_names(model, shapes) if is_whole else set[str]()  # Adapters have one dtype.
    rounded: set[str] = set()
    if pass_dtype is not torch.float32:
        rounded = rounded_names(model, shapes) if is_whole else set(shapes)
    return LiveWeights(
        named, dtype, exact=exact, rounded=rounded, pass_dtype=pass_dtype, gathering=gathering
    )


class KeptVersion(NamedTuple):
    """A version that is sent from the copy."""

    whole: PublishedWeights
    delta: PublishedWeights | None  # None: it is too large, or there is no version before.
    changed_frac: float | None  # Share of the compared entries that changed; None without a copy.


class VersionKeeper:
    """Keeps the newest version in host memory. For the publisher's thread.

    Example: keep(v3) copies the live weights, which may change from then on. The whole v3 is sent
    from the copy. keep(v4) compares v4 with the copy, part by part, and updates the copy. The
    delta is sent to the engines that hold v3, and the whole v4 to all others.
    """

    def __init__(self) -> None:
        """Start without a copy, as after a restart of the learner: the first version is whole."""
        self._copy: CopiedWeights | None = None
        self._version = -1
        self._sums = torch.zeros(2, dtype=torch.int64)  # Those of the copy; see `word_sums`.
        self._part = torch.zeros(0, dtype=torch.uint8)

    def keep(self, weights: PublishedWeights) -> KeptVersion:
        """Copy a version. Its source may change afterwards.

        Raises: LongstrideError: as `fill` of the source. No version can be kept after that.
        """
        source = weights.source
        base = self._version
        copy = self._copy_for(weights)
        packer = DeltaPacker(source.total_bytes, max_bytes=int(MAX_FRAC * source.total_bytes))
        for start in range(0, source.total_bytes, READ_BYTES):
            before = copy.buffer[start : start + READ_BYTES]
            if base < 0:
                source.fill(start, before)
            else:
                part = self._part_of(source)[: before.numel()]
                source.fill(start, part)
                packer.add(part, before)
        has_delta = base >= 0 and not packer.is_dense
        self._sums = packer.sums_after(self._sums) if has_delta else word_sums(copy.buffer)
        self._version = weights.version
        whole = replace(weights, source=copy, digest=sums_text(self._sums))
        delta = None
        if has_delta:
            sent = CopiedWeights(source.specs, packer.packed())
            sent.device = copy.device
            delta = replace(whole, source=sent, base=base)
        return KeptVersion(whole, delta, packer.changed_frac if base >= 0 else None)

    def _copy_for(self, weights: PublishedWeights) -> CopiedWeights:
        """Return the copy. Engines on GPUs are reached from the device of the live weights."""
        if self._copy is None:
            buffer = torch.zeros(weights.source.total_bytes, dtype=torch.uint8)
            self._copy = CopiedWeights(weights.tensors, buffer)
            self._copy.device = weights.source.device
        self._version = -1  # The copy is of no version until it is complete.
        return self._copy

    def _part_of(self, source: WeightSource) -> Tensor:
        """Return the buffer for reading a source in parts."""
        if not self._part.numel():
            is_pinned = source.device.type == "cuda"
            size = min(READ_BYTES, source.total_bytes)
            self._part = torch.zeros(size, dtype=torch.uint8, pin_memory=is_pinned)
        return self._part
