"""A side's place in the weight plane's process group, which it can leave in mid-transfer."""
# torch's type stubs lack half of what its C++ process groups export:
# pyright: reportPrivateImportUsage=false, reportUnknownMemberType=false

import threading
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import WeightSyncError
from common.wire.addresses import local_address_towards
from common.wire.collective import BroadcastGroup, Place, open_store
from common.wire.weight_messages import WeightsOffer

CANCEL_CHECK_S = 0.25  # between looks at whether a running transfer is still wanted


class TransferCancelled(WeightSyncError):
    """A transfer was given up, because a member is gone or the learner said so."""


class _Attempt(threading.Thread):
    """One broadcast, in a thread that can be left alone with a native call that does not end."""

    def __init__(
        self,
        buffer: Tensor,
        offer: WeightsOffer,
        group: BroadcastGroup | None,
        store: dist.Store | None,
    ) -> None:
        super().__init__(name=f"broadcast-{offer.group_epoch}", daemon=True)
        self._buffer = buffer
        self._offer = offer
        self._is_left = False
        self.group = group
        self.store = store
        self.is_ok = False
        self.error = ""
        self.has_ended = threading.Event()

    def run(self) -> None:
        """Make the group if there is none yet, and broadcast."""
        offer = self._offer
        if self._buffer.is_cuda:  # each thread has a current device of its own
            torch.cuda.set_device(self._buffer.device)
        try:
            if self.group is None:
                self.store = self.store or _connect(offer)
                bind_host, epoch = local_address_towards(offer.store_host), offer.group_epoch
                given = (offer.rank, offer.world_size, offer.backend, offer.timeout_s)
                self.group = BroadcastGroup(self.store, Place(*given, bind_host), epoch=epoch)
            if not self._is_left:
                self.group.broadcast(self._buffer)
                self.is_ok = True
        except WeightSyncError as error:
            self.error = str(error)
        finally:
            if not self.is_ok and self.group is not None:
                self.group.close()
            self.has_ended.set()

    def leave(self) -> None:
        """Abort what can be aborted; the thread ends then, or with the group's own deadline."""
        self._is_left = True
        if self.group is not None:
            self.group.close()


def _connect(offer: WeightsOffer) -> dist.Store:
    """Return a new connection to the offer's rendezvous store."""
    return open_store(
        offer.store_host, offer.store_port, is_server=False, timeout_s=offer.timeout_s
    )


class WeightGroup:
    """One side's place in the group of the present members, kept from version to version.

    Example: the learner broadcasts version 3 to a and b, and b is stopped.
        learner   is_cancelled() finds b gone -> raises TransferCancelled; cancel(store, epoch)
        engine a  finds the epoch cancelled in the store -> raises TransferCancelled, too
        learner   offers version 3 to a alone, in a new epoch

    Its two connections to the store outlive a group, because torch looks up the peer's name for
    each new one, which takes seconds where a name server does not answer. There are two because a
    store serves one call at a time on a connection, and joining a group blocks it.
    """

    def __init__(self) -> None:
        self._group: BroadcastGroup | None = None
        self._place: tuple[str, int, int] | None = None
        self._store_address: tuple[str, int] | None = None
        self._group_store: dist.Store | None = None  # for making groups
        self._watch_store: dist.Store | None = None  # for looking whether a transfer is cancelled
        self._left: list[_Attempt] = []  # cancelled, and perhaps still in a native call

    def broadcast(
        self, buffer: Tensor, offer: WeightsOffer, *, is_cancelled: Callable[[], bool]
    ) -> None:
        """Send (rank 0) or receive `buffer` [num_bytes] uint8 in place, in the offered group.

        Raises:
            TransferCancelled: `is_cancelled`, asked every `CANCEL_CHECK_S`, said so.
            WeightSyncError: a member is missing or died, or `offer.timeout_s` is over.
        """
        # A learner that starts again counts its epochs from the start; its store is another one.
        self._follow(offer)
        place = (offer.store_host, offer.store_port, offer.group_epoch)
        if place != self._place:
            self.leave()
        attempt = _Attempt(buffer, offer, self._group, self._group_store)
        self._group, self._place, self._group_store = None, None, None
        attempt.start()
        while not attempt.has_ended.wait(CANCEL_CHECK_S):
            if is_cancelled():
                attempt.leave()
                self._left = [each for each in [*self._left, attempt] if each.is_alive()]
                raise TransferCancelled(f"transfer given up epoch={offer.group_epoch}")
        if not attempt.is_ok:
            raise WeightSyncError(attempt.error or "the broadcast failed, see the log")
        self._group, self._place, self._group_store = attempt.group, place, attempt.store

    def receive(self, buffer: Tensor, offer: WeightsOffer) -> None:
        """Fill `buffer` [num_bytes] uint8 with the learner's bytes, for an engine.

        Raises:
            TransferCancelled: the learner gave the transfer up.
            WeightSyncError: as `broadcast`, or nobody serves the rendezvous store.
        """
        self._follow(offer)
        store = self._watch_store = self._watch_store or _connect(offer)
        is_cancelled = partial(_is_cancelled, store, offer.group_epoch)
        try:
            if is_cancelled():  # an offer that waited too long in a queue
                raise TransferCancelled(f"transfer given up epoch={offer.group_epoch}")
            self.broadcast(buffer, offer, is_cancelled=is_cancelled)
        except WeightSyncError:
            self._watch_store = None  # perhaps it is the connection that broke
            raise

    def _follow(self, offer: WeightsOffer) -> None:
        """Let the connections to another store go."""
        address = (offer.store_host, offer.store_port)
        if address != self._store_address:
            self._group_store, self._watch_store = None, None
        self._store_address = address

    def leave(self) -> None:
        """Let the connections of the group go."""
        if self._group is not None:
            self._group.close()
        self._group, self._place = None, None

    def join(self, *, timeout_s: float) -> None:
        """Wait for the threads of cancelled transfers; they end once the store is gone.

        One that comes back from its native call while the interpreter ends would abort the process.
        """
        deadline = time.monotonic() + timeout_s
        for attempt in self._left:
            attempt.join(max(0.0, deadline - time.monotonic()))


def cancel(store: dist.Store, epoch: int) -> None:
    """Tell every member of a group that its transfer is given up."""
    store.set(_cancel_key(epoch), "1")


def _is_cancelled(store: dist.Store, epoch: int) -> bool:
    """Return whether the learner gave the group's transfer up, or is itself gone."""
    try:
        return store.check([_cancel_key(epoch)])
    except RuntimeError:  # the connection broke
        return True


def _cancel_key(epoch: int) -> str:
    return f"cancelled/{epoch}"
