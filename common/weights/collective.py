"""Broadcast of flat byte buffers from the learner to engines, over torch.distributed.

Groups are created outside the default process group. A change of membership therefore creates a
new group, and the default process group stays as it is. CUDA uses NCCL, the CPU uses gloo.
"""
# torch's type stubs lack many functions of its C++ process groups:
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import hashlib
import hmac
import math
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import WeightSyncError
from common.weights.messages import TensorSpec, WeightsOffer
from common.wire.addresses import is_loopback

CPU = torch.device("cpu")
PROOF_BYTES = 16
PROOF_TIMEOUT_S = 10.0  # Maximum duration of the mutual membership proof.
SLICE = "MIG-"  # Prefix of the name of a GPU slice.
ALIGN_BYTES = 16  # Every tensor starts at a multiple of this, so a view of any dtype is legal.


def device_id(device: torch.device) -> str:
    """Return the globally unique name of a GPU, "" for the CPU.

    The name of a GPU slice comes from `CUDA_VISIBLE_DEVICES`.
    """
    if device.type != "cuda":
        return ""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip()
    if visible.startswith(SLICE):  # CUDA exposes at most one slice to a process.
        return visible
    return str(torch.cuda.get_device_properties(device).uuid)


@dataclass(frozen=True, slots=True)
class CollectiveMember:
    """Parameters with which one member joins a process group."""

    rank: int
    world_size: int
    backend: str  # "nccl"; any other value selects gloo.
    timeout_s: float  # Timeout of every call.
    bind_host: str  # The only address on which gloo listens.


def make_process_group(store: dist.Store, place: CollectiveMember) -> Any:
    """Return a process group outside the default one. Its `store` must have no other group.

    Raises: RuntimeError: a member did not connect in time.
    """
    timeout = timedelta(seconds=place.timeout_s)
    rank = place.rank
    world_size = place.world_size
    if place.backend == "nccl":
        choose_interface(place.bind_host)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, world_size, options)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=place.bind_host)]
    return dist.ProcessGroupGloo(store, rank, world_size, options)


class BroadcastGroup:
    """One process group: rank 0 sends, all other ranks receive. Use from one thread.

    Example:
        learner: group = BroadcastGroup(store, Place(0, 2, "gloo", ...), epoch=3)
                 group.broadcast(buffer)          waits for rank 1 up to timeout_s
        engine:  group = BroadcastGroup(store, Place(1, 2, "gloo", ...), epoch=3)
                 group.broadcast(buffer)          fills its buffer with rank 0's bytes

    Raises: WeightSyncError: a member is missing or dies; both sides raise within timeout_s.
    """

    def __init__(self, store: dist.Store, place: CollectiveMember, *, epoch: int) -> None:
        prefixed = dist.PrefixStore(f"weights/{epoch}", store)
        self.epoch = epoch
        is_nccl = place.backend == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if is_nccl else CPU
        self._timeout = timedelta(seconds=place.timeout_s)
        self._kept = store  # torch references only the C++ part of the store.
        try:
            self._group = make_process_group(prefixed, place)
            if not is_nccl:
                limit = min(self._timeout, timedelta(seconds=PROOF_TIMEOUT_S))
                prove_members(self._group, store, f"proof/{epoch}", timeout=limit)
        except (RuntimeError, ValueError) as error:
            what = f"no process group epoch={epoch} rank={place.rank}"
            raise WeightSyncError(f"{what}: {error}") from error

    def broadcast(self, buffer: Tensor) -> None:
        """Send (rank 0) or receive `buffer` [num_bytes] uint8 in place."""
        self._start(buffer).wait()
        if buffer.is_cuda:
            torch.cuda.current_stream(buffer.device).synchronize()

    def send(self, index: int, part: Tensor) -> "Broadcast":
        """Begin to send `part` [num_bytes] uint8 as rank 0. `index` is unused here."""
        return self._start(part)

    def receive(self, index: int, part: Tensor) -> "Broadcast":
        """Begin to fill `part` [num_bytes] uint8 with the next part from rank 0."""
        return self._start(part)

    def barrier(self) -> None:
        """Wait for all members. Raises: WeightSyncError: a member did not arrive in time."""
        gathered = dist.AllreduceOptions()
        gathered.timeout = self._timeout
        Broadcast(
            self._group.allreduce([torch.zeros(1, device=self.device)], gathered),
            self._timeout,
            self._failed,
        ).wait()

    def _start(self, part: Tensor) -> "Broadcast":
        """Begin a broadcast of a part, from rank 0 to all."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = self._timeout
        options.asyncOp = True
        try:
            work = self._group.broadcast([part], options)
        except RuntimeError as error:
            raise self._failed(error) from error
        return Broadcast(work, self._timeout, self._failed)

    def _failed(self, error: RuntimeError) -> WeightSyncError:
        return WeightSyncError(f"broadcast failed epoch={self.epoch}: {error}")

    def close(self) -> None:
        """Abort transfers in flight and close the connections."""
        try:
            self._group.abort()
        except RuntimeError:  # gloo raises if a peer has already disconnected.
            return


def prove_members(group: Any, store: dist.Store, name: str, *, timeout: timedelta) -> None:
    """Exchange a proof of membership between each pair of ranks of a group of gloo.

    gloo accepts the first process that connects. NCCL needs no proof: its id, which members
    read from the store, is a shared secret.

    Args:
        group: the group of gloo, before its first transfer.
        store: the rendezvous, which only members can read.
        name: name of the group in the store.

    Raises: WeightSyncError: a process outside the group occupies a rank, or a rank is silent.
    """
    rank = group.rank()
    size = group.size()
    if rank == 0:
        store.set(name, secrets.token_hex(32))
    secret = store.get(name)
    proofs = [_proof(secret, rank, other) for other in range(size)]
    sent = torch.frombuffer(bytearray(b"".join(proofs)), dtype=torch.uint8)
    came = torch.zeros_like(sent)
    options = dist.AllToAllOptions()
    options.timeout = timeout
    try:
        group.alltoall_base(came, sent, [], [], options).wait(timeout)
    except RuntimeError as error:
        raise WeightSyncError(f"a rank has not proved its membership: {error}") from error
    for other, proof in enumerate(came.view(size, PROOF_BYTES)):
        if not hmac.compare_digest(bytes(proof.tolist()), _proof(secret, other, rank)):
            raise WeightSyncError(f"a process outside the group connected as rank {other}")


def _proof(secret: bytes, sender: int, receiver: int) -> bytes:
    """Return the membership proof of `sender` for `receiver`: a MAC with the group's secret."""
    return hmac.digest(secret, b"%d>%d" % (sender, receiver), hashlib.sha256)[:PROOF_BYTES]


class Broadcast:
    """A broadcast in flight."""

    def __init__(
        self, work: Any, timeout: timedelta, failed: Callable[[RuntimeError], WeightSyncError]
    ) -> None:
        self._work = work
        self._timeout = timeout
        self._failed = failed

    def wait(self) -> None:
        """Block until a gloo broadcast has ended. For NCCL, make the current stream wait for it.

        Raises: WeightSyncError: a member is missing or died.
        """
        try:
            self._work.wait(self._timeout)
        except RuntimeError as error:
            raise self._failed(error) from error


def choose_interface(host: str) -> None:
    """Set the network interface of NCCL to the one with address `host`, unless the user set one.

    NCCL reads the setting once per process. A loopback address therefore leaves it unset.
    """
    if not is_loopback(host):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface_of(host)}")


def interface_of(host: str) -> str:
    """Return the name of this machine's network interface with the address, "lo" for loopback.

    Raises: WeightSyncError: no interface has this address.
    """
    address = str(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0])
    for name, found in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in found):
            return name
    raise WeightSyncError(f"{host}: no network interface of this machine has this address")


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
