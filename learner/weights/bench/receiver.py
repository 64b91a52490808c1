"""A receiver of the suite, as a process: `-m learner.weights.bench.receiver "{...}"`.

It imports little: several start at once.
"""

import json
import sys
from dataclasses import dataclass

import torch

from common.wire.collective import BroadcastGroup, Place, open_store
from common.wire.transfer.buckets import Cut, receive_buckets
from common.wire.weight_group import lower_priority

HOST = "127.0.0.1"
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Receiver:
    """What a receiving process is told."""

    port: int
    rank: int
    world_size: int
    num_bytes: int
    bucket_bytes: int
    plan: list[str]  # "raw" or "ours", in turn


def receive(told: Receiver) -> None:
    """Take part in all rounds of a plan, each bucket checked in those of ours."""
    torch.set_num_threads(1)
    lower_priority()
    store = open_store(HOST, told.port, is_server=False, timeout_s=TIMEOUT_S)
    staging = torch.zeros(told.num_bytes, dtype=torch.uint8)
    place = Place(told.rank, told.world_size, "gloo", TIMEOUT_S, HOST)
    group = BroadcastGroup(store, place, epoch=1)
    cut = Cut(told.num_bytes, told.bucket_bytes)
    for kind in told.plan:
        group.barrier()
        if kind == "raw":
            group.broadcast(staging)
        else:
            receive_buckets(group, cut, staging, [])
        group.barrier()
    group.close()


if __name__ == "__main__":
    receive(Receiver(**json.loads(sys.argv[1])))
