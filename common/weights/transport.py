"""Transports of a version: broadcasts (NCCL, gloo), memory of one GPU (CUDA IPC), own memory.

`WeightGroup` is the only entrance: it sends or receives one version, and can be cancelled.
"""
# torch's type stubs lack many functions of its C++ process groups, and the sharing of CUDA memory:
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import LongstrideError, WeightSyncError
from common.weights.buckets import (
    CPU,
    BucketLayout,
    Channel,
    OnPart,
    receive_buckets,
    send_buckets,
    unchecked,
    write_buckets,
)
from common.weights.messages import WeightsOffer
from common.weights.rendezvous import (
    PROOF_TIMEOUT_S,
    GroupStore,
    StoreConnection,
    StorePlace,
    choose_interface,
    prove_members,
)
from common.wire.addresses import local_address_towards

logger = logging.getLogger(__name__)

SLICE = "MIG-"  # Prefix of the name of a GPU slice.
TRANSFER_NICENESS = 10
CANCEL_CHECK_S = 0.25  # Seconds between two checks whether a running transfer was cancelled.
RELEASE_S = 5.0  # Seconds for the receivers to close shared memory after a transfer.

# A transfer over a channel, or in memory of this process. The event is set once it is cancelled.
Work = Callable[[Channel | None, threading.Event], None]


class TransferCancelled(WeightSyncError):
    """A transfer was cancelled, by the learner or because a member is lost."""


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
            self._group = self._make(prefixed, place)
            if not is_nccl:
                limit = min(self._timeout, timedelta(seconds=PROOF_TIMEOUT_S))
                prove_members(self._group, store, f"proof/{epoch}", timeout=limit)
        except (RuntimeError, ValueError) as error:
            what = f"no process group epoch={epoch} rank={place.rank}"
            raise WeightSyncError(f"{what}: {error}") from error

    def _make(self, store: dist.Store, place: CollectiveMember) -> Any:
        """Return a process group outside the default one, so that membership may change."""
        if place.backend == "nccl":
            choose_interface(place.bind_host)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            return dist.ProcessGroupNCCL(store, place.rank, place.world_size, options)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = self._timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=place.bind_host)]
        return dist.ProcessGroupGloo(store, place.rank, place.world_size, options)

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


class IpcChannel:
    """Carries parts in GPU memory of the sender, from which receivers on the same GPU copy them.

    The rendezvous store holds the handle of each part and the acknowledgements of the receivers. A
    part may change after every receiver has copied it.

    Raises: WeightSyncError: a wait for the other side timed out, or the transfer was cancelled.
    """

    def __init__(
        self,
        store: GroupStore,
        device: torch.device,
        *,
        name: str,
        rank: int,
        world_size: int,
        timeout_s: float,
        is_left: Callable[[], bool],
    ) -> None:
        self.device = device
        self._store = store
        self._name = name  # Unique among the transfers of this store.
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._is_left = is_left
        self._shared: dict[int, list[Any]] = {}  # CUDA IPC handles by memory address.
        self._opened: dict[str, torch.UntypedStorage] = {}  # Opened memory by handle.

    def send(self, index: int, part: Tensor) -> "IpcPart":
        """Publish the handle of a part, which is in use until `wait`."""
        key = self._key(index)
        self._store.set(key, self.share(part))
        copied = [f"{key}/{rank}" for rank in range(1, self._world_size)]

        def wait() -> None:
            """Wait until all receivers have copied the part."""
            self._wait_for(copied, f"the receivers of part {index}")
            # Without this the store would grow over thousands of versions.
            self._store.delete([key, *copied])

        return IpcPart(wait)

    def receive(self, index: int, part: Tensor) -> "IpcPart":
        """Return a pending part, which `wait` copies."""
        key = self._key(index)

        def wait() -> None:
            """Wait for a part, copy it, and confirm that."""
            self._wait_for([key], f"the learner's part {index}")
            self.copy(self._store.get(key).decode(), part)
            self._store.set(f"{key}/{self._rank}", "1")

        return IpcPart(wait)

    def share(self, part: Tensor) -> str:
        """Return the handle of a part's memory, after the current stream has filled it."""
        storage = part.untyped_storage()
        if storage.data_ptr() not in self._shared:
            handle: tuple[Any, ...] = storage._share_cuda_()
            self._shared[storage.data_ptr()] = [
                field.hex() if isinstance(field, bytes) else field for field in handle
            ]
        torch.cuda.current_stream(self.device).synchronize()
        return json.dumps([part.storage_offset(), self._shared[storage.data_ptr()]])

    def copy(self, shared: str, part: Tensor) -> None:
        """Copy a part out of the memory of the process that shares it."""
        offset, fields = json.loads(shared)
        handle = [bytes.fromhex(field) if isinstance(field, str) else field for field in fields]
        handle[0] = self.device.index  # The same GPU may have another index in this process.
        key = json.dumps(fields)
        if key not in self._opened:
            self._opened[key] = torch.UntypedStorage._new_shared_cuda(*handle)
        memory = torch.empty(0, dtype=torch.uint8, device=self.device)
        cast(Any, memory).set_(self._opened[key], offset, (part.numel(),))
        part.copy_(memory)
        torch.cuda.current_stream(self.device).synchronize()

    def release(self) -> None:
        """Close the memory of the process that shares it, which may end from now on."""
        self._opened.clear()
        torch.cuda.ipc_collect()

    def finish(self) -> None:
        """Close shared memory after the last part; the sender waits for the receivers.

        A process that ends while others have its CUDA memory open leaves it in an undefined state.
        A receiver that does not close the memory in time is logged, since it has the whole version.
        """
        self.release()
        if self._rank > 0:
            self._store.set(f"mail/{self._name}/released/{self._rank}", "1")
            return
        keys = [f"mail/{self._name}/released/{rank}" for rank in range(1, self._world_size)]
        deadline = time.monotonic() + RELEASE_S
        while not self._store.has(keys, within_s=CANCEL_CHECK_S):
            if self._is_left() or time.monotonic() > deadline:
                logger.warning("an engine has not closed shared memory transfer=%s", self._name)
                return
        self._store.delete(keys)

    def _key(self, index: int) -> str:
        """Return the key of a part's handle."""
        return f"mail/{self._name}/{index}"

    def _wait_for(self, keys: list[str], what: str) -> None:
        """Wait until keys exist. Raises: WeightSyncError: the wait timed out."""
        deadline = time.monotonic() + self._timeout_s
        while not self._store.has(keys, within_s=CANCEL_CHECK_S):
            if self._is_left() or time.monotonic() > deadline:
                raise WeightSyncError(f"{what}: not available within {self._timeout_s:g} s")


class IpcPart:
    """A part in transit through an `IpcChannel`."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait


class _Attempt(threading.Thread):
    """One transfer in a thread of its own, which can be abandoned if a native call hangs."""

    def __init__(
        self,
        work: Work,
        device: torch.device,
        offer: WeightsOffer,
        group: BroadcastGroup | None,
        connection: StoreConnection | None,
    ) -> None:
        super().__init__(name=f"transfer-{offer.group_epoch}", daemon=True)
        self._work = work
        self._device = device
        self._offer = offer
        self._is_left = threading.Event()
        self.group = group
        self.connection = connection
        self._store: GroupStore | None = None
        self.seconds = 0.0
        self.is_ok = False
        self.error: LongstrideError | None = None
        self.has_ended = threading.Event()

    def run(self) -> None:
        """Create the group if necessary, and run the transfer."""
        lower_priority()
        if self._device.type == "cuda":  # The current device is a setting of each thread.
            torch.cuda.set_device(self._device)
        try:
            channel = self._channel()
            started = time.monotonic()
            if not self._is_left.is_set():
                self._work(channel, self._is_left)
                if isinstance(channel, IpcChannel):
                    channel.finish()
                self.seconds = time.monotonic() - started
                self.is_ok = True
        except LongstrideError as error:
            self.error = error
        finally:
            if not self.is_ok and self.group is not None:
                self.group.close()
            self.has_ended.set()

    def _channel(self) -> Channel | None:
        """Return the channel of an offer, by its transport; None for memory of this process."""
        offer = self._offer
        if offer.is_in_memory:
            return None
        connection = self.connection = self.connection or StoreConnection(
            place_of(offer), answer_s=offer.timeout_s
        )
        store = GroupStore(connection, offer.group_key, timeout_s=offer.timeout_s)
        self._store = store
        if offer.transport == "ipc":
            return IpcChannel(
                store,
                self._device,
                name=f"{offer.group_epoch}/{offer.version}",
                rank=offer.rank,
                world_size=offer.world_size,
                timeout_s=offer.timeout_s,
                is_left=self._is_left.is_set,
            )
        if offer.transport not in ("nccl", "gloo"):
            raise WeightSyncError(
                f"this version of the code has no transport {offer.transport!r};"
                " use learner.weights_transport=auto"
            )
        if self.group is None:
            place = CollectiveMember(
                rank=offer.rank,
                world_size=offer.world_size,
                backend=offer.transport,
                timeout_s=offer.timeout_s,
                bind_host=local_address_towards(offer.store_host),
            )
            self.group = BroadcastGroup(store, place, epoch=offer.group_epoch)
        return self.group

    def leave(self) -> None:
        """Abort the transfer. The thread ends at once or at the timeout of the group."""
        self._is_left.set()
        if self._store is not None:
            self._store.leave()
        if self.group is not None:
            self.group.close()


def lower_priority() -> None:
    """Lower the priority of the calling thread, and of threads it starts, below the default.

    A slow transfer costs less than a transfer that takes CPU time from training or generation.
    """
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), TRANSFER_NICENESS)
    except OSError:  # The system has no thread priorities, or the priority is already lower.
        return


def _unless_left(fill: OnPart, is_left: threading.Event) -> OnPart:
    """Return `fill`, which raises TransferCancelled once the transfer was left.

    The source may have changed to the next version while it was read.
    """

    def fill_for_us(start: int, part: Tensor) -> None:
        fill(start, part)
        if is_left.is_set():
            raise TransferCancelled("transfer cancelled while weights were read")

    return fill_for_us


def place_of(offer: WeightsOffer) -> StorePlace:
    """Return the address and keys of the rendezvous store of an offer."""
    return StorePlace(offer.store_host, offer.store_port, offer.store_public, offer.store_secret)


class WeightGroup:
    """The process group of the current members, kept from version to version.

    Example: the learner sends version 3 to engines a and b, and b is stopped.
        learner   is_cancelled() detects the loss of b -> `send` raises TransferCancelled, and the
                  learner sends WeightsCancel to a
        engine a  is_cancelled() returns True -> `receive` raises TransferCancelled
        learner   offers version 3 to a alone, in a new epoch

    The connection to the rendezvous stays open when the group changes.
    """

    def __init__(self) -> None:
        self._group: BroadcastGroup | None = None
        self._place: tuple[str, int, int] | None = None
        self._store_place: StorePlace | None = None
        self._connection: StoreConnection | None = None  # The connection to `_store_place`.
        self._left: list[_Attempt] = []  # Cancelled transfers that may still be in a native call.
        self._reported: tuple[str, str] | None = None  # Group and key of the last `report_copy`.

    def send(
        self,
        slots: Sequence[Tensor],
        fill: OnPart,
        offer: WeightsOffer,
        *,
        check: OnPart = unchecked,
        is_cancelled: Callable[[], bool],
    ) -> float:
        """Send a version as rank 0 of the offered group; return the seconds it took.

        Args:
            slots, fill, check: see `send_buckets`.

        Raises:
            TransferCancelled: `is_cancelled`, called every `CANCEL_CHECK_S`, returned True.
            WeightSyncError: a member is missing or died, or the transfer exceeded
                `offer.timeout_s`.
        """
        cut = BucketLayout(offer.total_bytes, offer.bucket_bytes)

        def work(channel: Channel | None, is_left: threading.Event) -> None:
            assert channel is not None
            send_buckets(channel, cut, slots, _unless_left(fill, is_left), check=check)

        return self._transfer(work, slots[0].device, offer, is_cancelled)

    def write(
        self,
        target: Tensor,
        slots: Sequence[Tensor],
        fill: OnPart,
        offer: WeightsOffer,
        *,
        check: OnPart = unchecked,
        is_cancelled: Callable[[], bool],
    ) -> tuple[str, float]:
        """Write a version to memory of this process; return its checksum and the seconds it took.

        Args:
            target, slots, fill, check: see `write_buckets`.

        Raises: TransferCancelled: as `send`. The cancelled thread may still write to `target`.
        """
        cut = BucketLayout(offer.total_bytes, offer.bucket_bytes)
        checksums: list[str] = []

        def work(_: Channel | None, is_left: threading.Event) -> None:
            unless_left = _unless_left(fill, is_left)
            checksums.append(write_buckets(target, cut, slots, unless_left, check=check))

        seconds = self._transfer(work, target.device, offer, is_cancelled)
        return checksums[0], seconds

    def receive(
        self,
        staging: Tensor,
        device: torch.device,
        offer: WeightsOffer,
        *,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> float:
        """Fill `staging` [total_bytes] uint8 with a version and check it, for a worker of `device`.

        Returns: the seconds it took.

        Raises:
            TransferCancelled: `is_cancelled` returned True. The cancelled thread may write to
                `staging` until `is_busy` is False.
            BucketDamaged: the received bytes differ from the sent bytes.
            WeightSyncError: as in `send`, or the rendezvous store does not answer.
        """
        cut = BucketLayout(offer.total_bytes, offer.bucket_bytes)

        def work(channel: Channel | None, _: threading.Event) -> None:
            assert channel is not None
            specs = offer.tensors if offer.base < 0 else []  # Changes have no tensors.
            receive_buckets(channel, cut, staging, specs)

        if is_cancelled():  # The offer was cancelled while it was queued.
            raise TransferCancelled(f"transfer cancelled epoch={offer.group_epoch}")
        return self._transfer(work, device, offer, is_cancelled)

    def _transfer(
        self,
        work: Work,
        device: torch.device,
        offer: WeightsOffer,
        is_cancelled: Callable[[], bool],
    ) -> float:
        """Run a transfer in its own thread; return the seconds it took."""
        # A restarted learner may repeat epochs. The address of its store distinguishes them.
        self._follow(offer)
        place = (offer.store_host, offer.store_port, offer.group_epoch)
        if place != self._place:
            self.leave()
        attempt = _Attempt(work, device, offer, self._group, self._connection)
        self._group = None
        self._place = None
        self._connection = None
        attempt.start()
        while not attempt.has_ended.wait(CANCEL_CHECK_S):
            if is_cancelled():
                attempt.leave()
                self._left = [each for each in [*self._left, attempt] if each.is_alive()]
                raise TransferCancelled(f"transfer cancelled epoch={offer.group_epoch}")
        if not attempt.is_ok:
            raise attempt.error or WeightSyncError("the transfer failed; the log has the reason")
        self._group = attempt.group
        self._place = place
        self._connection = attempt.connection
        return attempt.seconds

    def report_copy(self, offer: WeightsOffer, *, place: str = "", error: str = "") -> None:
        """Report the place of the copy that this worker received for its node, or the failure.

        Raises: WeightSyncError: the rendezvous store does not answer.
        """
        store = self._store(offer)
        before = self._reported
        self._reported = (offer.group_key, offer.copy_key)
        if before is not None and before[0] == offer.group_key:
            # Without this the store would grow over thousands of versions.
            store.delete([before[1]])
        store.set(offer.copy_key, json.dumps({"place": place, "error": error}))

    def find_copy(self, offer: WeightsOffer, *, is_cancelled: Callable[[], bool]) -> str:
        """Wait for the report of the worker that receives for this node; return the copy's place.

        Raises:
            TransferCancelled: `is_cancelled` returned True, or the other worker failed.
            WeightSyncError: there is no report in time, or the rendezvous store does not answer.
        """
        store = self._store(offer)
        deadline = time.monotonic() + 2 * offer.timeout_s
        while not store.has([offer.copy_key], within_s=CANCEL_CHECK_S):
            if is_cancelled():
                raise TransferCancelled(f"transfer cancelled epoch={offer.group_epoch}")
            if time.monotonic() > deadline:
                raise WeightSyncError(
                    f"the worker that receives version {offer.version} for this node has not"
                    f" reported within {2 * offer.timeout_s:g} s"
                )
        report = json.loads(store.get(offer.copy_key))
        if report["error"]:
            raise TransferCancelled(f"the worker that receives for this node: {report['error']}")
        return str(report["place"])

    def _store(self, offer: WeightsOffer) -> GroupStore:
        """Return the rendezvous store of an offer."""
        self._follow(offer)
        if self._connection is None:
            self._connection = StoreConnection(place_of(offer), answer_s=offer.timeout_s)
        return GroupStore(self._connection, offer.group_key, timeout_s=offer.timeout_s)

    def _follow(self, offer: WeightsOffer) -> None:
        """Drop the connection to the previous rendezvous if the offer has another one."""
        place = place_of(offer)
        if place != self._store_place:
            self._connection = None
        self._store_place = place

    def leave(self) -> None:
        """Close the connections of the group."""
        if self._group is not None:
            self._group.close()
        self._group = None
        self._place = None

    @property
    def is_busy(self) -> bool:
        """Whether the thread of a cancelled transfer is still running."""
        return any(attempt.is_alive() for attempt in self._left)

    def join(self, *, timeout_s: float) -> None:
        """Wait for the threads of cancelled transfers. They end after the store has closed.

        A thread that returns from a native call during interpreter shutdown aborts the process.
        """
        deadline = time.monotonic() + timeout_s
        for attempt in self._left:
            attempt.join(max(0.0, deadline - time.monotonic()))
