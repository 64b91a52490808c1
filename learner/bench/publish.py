"""Weights from one process to another: how fast, and whether the same bytes arrive.

Run as a module it is the receiver: `python -m learner.bench.publish '{"port": ...}'`.
"""

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from common.errors import WeightSyncError
from common.repository import ROOT
from common.wire.collective import BroadcastGroup, Place, open_store
from common.wire.transfer.digest import checksum, digest
from learner.bench.step import clock_of
from learner.policy.model import published_tensors
from learner.weights.source import LiveWeights

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Receiver:
    port: int  # of the rendezvous store
    num_bytes: int
    num_rounds: int
    device: str
    backend: str  # nccl or gloo
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    num_bytes: int
    send_s: float  # of one broadcast, as the receiver saw it
    is_equal: bool  # the receiver's checksum is the sender's

    @property
    def gb_per_s(self) -> float:
        return self.num_bytes / self.send_s / 1e9


@dataclass(frozen=True, slots=True)
class FlatWeights:
    """All that a version consists of, in one buffer."""

    buffer: torch.Tensor  # [num_bytes] uint8


def snapshot_weights(model: PreTrainedModel, dtype: torch.dtype) -> tuple[FlatWeights, float]:
    """Return the weights as they are published, and the seconds that cast and digest took."""
    source = LiveWeights(published_tensors(model), dtype)
    buffer = torch.zeros(source.total_bytes, dtype=torch.uint8, device=source.device)
    clock = clock_of(source.device)
    started = clock()
    source.fill(0, buffer)
    digest(buffer)
    return FlatWeights(buffer), clock() - started


def broadcast_to_peer(
    weights: FlatWeights, *, backend: str, peer_device: str, num_rounds: int, timeout_s: float
) -> Transfer:
    """Send a version `num_rounds` times to a process of its own and compare checksums.

    Args:
        weights: the buffer's device is the sender's.
        peer_device: "cpu", or a GPU other than the sender's: NCCL allows one rank per GPU.
        timeout_s: for the process to start and join, for each broadcast, and for it to end.

    Raises:
        WeightSyncError: the receiver failed or is silent; holds its last words.
    """
    store = open_store(HOST, 0, is_server=True, timeout_s=timeout_s)
    receiver = Receiver(
        port=store.port,
        num_bytes=weights.buffer.numel(),
        num_rounds=num_rounds,
        device=peer_device,
        backend=backend,
        timeout_s=timeout_s,
    )
    argv = [sys.executable, "-m", "learner.bench.publish", json.dumps(asdict(receiver))]
    process = subprocess.Popen(
        argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        group = _group(store, 0, 2, backend, timeout_s)
        for _ in range(1 + num_rounds):
            group.broadcast(weights.buffer)
        output, errors = process.communicate(timeout=timeout_s)
        group.close()
    except (WeightSyncError, subprocess.TimeoutExpired) as error:
        process.kill()
        _, errors = process.communicate()
        raise WeightSyncError(f"{error}; receiver: {errors[-500:]}") from error
    if process.returncode != 0:
        raise WeightSyncError(f"receiver ended with {process.returncode}: {errors[-500:]}")
    reply = json.loads(output.splitlines()[-1])
    return Transfer(
        num_bytes=receiver.num_bytes,
        send_s=reply["send_s"],
        is_equal=reply["checksum"] == checksum(weights.buffer),
    )


def broadcast_alone(buffer: torch.Tensor, *, backend: str, timeout_s: float) -> None:
    """Broadcast in a group of one rank. Raises: WeightSyncError: the backend is not there."""
    store = open_store(HOST, 0, is_server=True, timeout_s=timeout_s)
    group = _group(store, 0, 1, backend, timeout_s)
    group.broadcast(buffer)
    group.close()


def _group(
    store: Any, rank: int, world_size: int, backend: str, timeout_s: float
) -> BroadcastGroup:
    return BroadcastGroup(store, Place(rank, world_size, backend, timeout_s, HOST), epoch=1)


def receive(receiver: Receiver) -> dict[str, Any]:
    """Take part in all rounds; return the time of one and the checksum of what has come."""
    store = open_store(HOST, receiver.port, is_server=False, timeout_s=receiver.timeout_s)
    device = torch.device(receiver.device)
    buffer = torch.zeros(receiver.num_bytes, dtype=torch.uint8, device=device)
    group = _group(store, 1, 2, receiver.backend, receiver.timeout_s)
    group.broadcast(buffer)  # connections are made in the first one
    started = time.perf_counter()
    for _ in range(receiver.num_rounds):
        group.broadcast(buffer)
    send_s = (time.perf_counter() - started) / receiver.num_rounds
    reply = {"send_s": send_s, "checksum": checksum(buffer)}
    group.close()
    return reply


if __name__ == "__main__":
    sys.stdout.write(json.dumps(receive(Receiver(**json.loads(sys.argv[1])))) + "\n")
