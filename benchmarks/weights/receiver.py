"""A receiver of the suites, as a process: `-m benchmarks.weights.receiver "{...}"`.

It has few imports, because several receivers start at once.
"""

import json
import sys
from dataclasses import dataclass

import torch

from common.weights.buckets import BucketLayout, Channel, receive_buckets
from common.weights.node_copy import CopyView, MappedCopy
from common.weights.rendezvous import GroupStore, StoreConnection, StorePlace
from common.weights.transport import BroadcastGroup, CollectiveMember, IpcChannel, lower_priority

HOST = "127.0.0.1"
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Receiver:
    """The arguments of one side of some transfers; rank 0 sends."""

    port: int  # Port of the rendezvous.
    public: str
    secret: str
    group: str
    rank: int
    world_size: int
    num_bytes: int
    bucket_bytes: int
    plan: list[str]  # "raw" or "ours" for each round.
    transport: str = "gloo"  # The name of the transport in an offer.
    device: str = "cpu"  # Device of this side.
    timeout_s: float = TIMEOUT_S


class TransferPeer:
    """One side's connections: a gloo group for barriers, and the group for the buckets."""

    def __init__(self, store: GroupStore, receiver: Receiver) -> None:
        """Connect to the other sides. Raises: WeightSyncError: not all connected in time."""
        self._store = store
        self._receiver = receiver
        self._device = torch.device(receiver.device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self.meeting = self._group("gloo", 1)
        self._mapped: MappedCopy | None = None  # The sender's memory, as a worker keeps it.
        self.carrier = self._group("nccl", 2) if receiver.transport == "nccl" else self.meeting

    def _group(self, backend: str, epoch: int) -> BroadcastGroup:
        """Return the process group of a transport."""
        receiver = self._receiver
        place = CollectiveMember(
            receiver.rank, receiver.world_size, backend, receiver.timeout_s, HOST
        )
        return BroadcastGroup(self._store, place, epoch=epoch)

    def channel(self, number: int) -> Channel:
        """Return the channel for the buckets of a round, made as for a version of a run."""
        receiver = self._receiver
        if receiver.transport != "ipc":
            return self.carrier
        return IpcChannel(
            self._store,
            self._device,
            name=str(number),
            rank=receiver.rank,
            world_size=receiver.world_size,
            timeout_s=receiver.timeout_s,
            is_left=lambda: False,
        )

    def offer_copy(self, number: int, place: str) -> None:
        """Publish the place of a round's version in memory, which a run sends in its offer."""
        self._store.set(f"copy/{number}", place)

    def map_copy(self, number: int) -> None:
        """Map and check a round's version in the memory of the sender."""
        place = self._store.get(f"copy/{number}").decode()
        view = CopyView(place, number, before=self._mapped)
        self._mapped = view.mapped
        view.unlock()

    def close(self) -> None:
        """Close the connections."""
        for group in {self.meeting, self.carrier}:
            group.close()


def meet(receiver: Receiver) -> GroupStore:
    """Return a side's connection to the rendezvous."""
    place = StorePlace(HOST, receiver.port, receiver.public, receiver.secret)
    return GroupStore(StoreConnection(place), receiver.group, timeout_s=receiver.timeout_s)


def receive(receiver: Receiver) -> None:
    """Receive all rounds of a plan, and verify each bucket in rounds of kind "ours"."""
    torch.set_num_threads(1)
    lower_priority()
    store = meet(receiver)
    staging = torch.zeros(receiver.num_bytes, dtype=torch.uint8, device=receiver.device)
    side = TransferPeer(store, receiver)
    cut = BucketLayout(receiver.num_bytes, receiver.bucket_bytes)
    for number, kind in enumerate(receiver.plan):
        side.meeting.barrier()
        if kind == "raw":
            side.carrier.broadcast(staging)
        elif receiver.transport == "memory":
            side.map_copy(number)
        else:
            receive_buckets(side.channel(number), cut, staging, [])
        side.meeting.barrier()
    side.close()


if __name__ == "__main__":
    receive(Receiver(**json.loads(sys.argv[1])))
