"""Membership of one process in the weight plane's process group. Transfers can be cancelled."""
# torch's type stubs lack many functions of its C++ process groups:
# pyright: reportPrivateImportUsage=false, reportUnknownMemberType=false

import json
import os
import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from common.errors import LongstrideError, WeightSyncError
from common.weights.buckets import (
    BucketLayout,
    Channel,
    OnPart,
    receive_buckets,
    send_buckets,
    unchecked,
    write_buckets,
)
from common.weights.collective import BroadcastGroup, CollectiveMember
from common.weights.mailbox import FolderStorage, GpuStorage, Mailbox
from common.weights.messages import WeightsOffer
from common.weights.rendezvous import StorePlace
from common.weights.rendezvous_client import GroupStore, StoreConnection
from common.wire.addresses import local_address_towards

TRANSFER_NICENESS = 10
CANCEL_CHECK_S = 0.25  # Seconds between two checks whether a running transfer was cancelled.

# A transfer over a channel, or in memory of this process. The event is set once it is cancelled.
Work = Callable[[Channel | None, threading.Event], None]


class TransferCancelled(WeightSyncError):
    """A transfer was cancelled, by the learner or because a member is lost."""


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
                if isinstance(channel, Mailbox):
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
        if offer.transport in ("ipc", "file"):
            is_file = offer.transport == "file"
            epoch = offer.group_epoch
            return Mailbox(
                store,
                FolderStorage(offer.folder, epoch, check=self._check_wanted)
                if is_file
                else GpuStorage(self._device),
                name=f"{epoch}/{offer.version}",
                rank=offer.rank,
                world_size=offer.world_size,
                timeout_s=offer.timeout_s,
                is_left=self._is_left.is_set,
            )
        if self.group is None:
            bind_host = local_address_towards(offer.store_host)
            epoch = offer.group_epoch
            given = (offer.rank, offer.world_size, offer.transport, offer.timeout_s)
            self.group = BroadcastGroup(store, CollectiveMember(*given, bind_host), epoch=epoch)
        return self.group

    def _check_wanted(self) -> None:
        if self._is_left.is_set():
            raise TransferCancelled("cancelled while the disk was full")

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
        found: list[str] = []

        def work(_: Channel | None, is_left: threading.Event) -> None:
            unless_left = _unless_left(fill, is_left)
            found.append(write_buckets(target, cut, slots, unless_left, check=check))

        seconds = self._transfer(work, target.device, offer, is_cancelled)
        return found[0], seconds

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
