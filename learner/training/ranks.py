"""The learner's ranks: each computes its share of a batch and keeps its share of the weights."""

import heapq
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from common.errors import LongstrideError

SAVE_TIMEOUT = timedelta(minutes=30)  # until all must have written their parts of a checkpoint


class Order(NamedTuple):
    """What all ranks do next, told by rank 0."""

    kind: str  # "train", "score", "save", "checksums" or "warm_up", see `Trainer`
    version: int = 0
    must_train: bool = False
    must_skip: bool = False
    payload: bytes = b""


class Ranks:
    """The processes that train one policy together. One rank needs no mesh.

    Losses are divided by the whole minibatch's counts, so the sum of the ranks' gradients is the
    gradient of one large batch. All make the same passes: sharded weights are put together by all.
    """

    def __init__(
        self, mesh: DeviceMesh | None = None, *, publish_group: dist.ProcessGroup | None = None
    ) -> None:
        """Wrap a mesh of one dimension over the default process group; None is a single rank.

        Args:
            publish_group: of the same ranks, for what another thread gathers beside training.
        """
        self.mesh = mesh
        self.publish_group: dist.ProcessGroup | None = publish_group
        self.index = 0 if mesh is None else mesh.get_local_rank()
        self.size = 1 if mesh is None else mesh.size()
        # Of its own: a thread writes checkpoints while training goes on.
        self.saving: dist.ProcessGroup | None = None
        if mesh is not None:
            group = dist.new_group(backend="gloo", timeout=SAVE_TIMEOUT)
            assert isinstance(group, dist.ProcessGroup)  # this rank is in it
            self.saving = group

    @property
    def publish_device(self) -> str:
        """The device whose tensors `publish_group` carries."""
        return "cpu" if self.mesh is None else self.mesh.device_type

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks of a tensor that has the same shape on each."""
        if self.mesh is None:
            return values
        summed = values.to(self.mesh.device_type, copy=True)  # NCCL takes CUDA's only
        dist.all_reduce(summed)
        return summed.to(values.device)

    def send(self, payload: bytes) -> None:
        """As rank 0, send bytes to all others."""
        assert self.mesh is not None
        sent = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        dist.broadcast(sent.to(self.mesh.device_type), 0)

    def receive(self, num_bytes: int) -> bytes:
        """Return the bytes that rank 0 sends at this moment."""
        assert self.mesh is not None
        buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=self.mesh.device_type)
        dist.broadcast(buffer, 0)
        return buffer.cpu().numpy().tobytes()

    @contextmanager
    def in_touch(self, what: str) -> Iterator[None]:
        """Name the ranks in an error of what they do together. Raises: LongstrideError."""
        try:
            yield
        except RuntimeError as error:
            if self.mesh is None:
                raise
            reason = " ".join(str(error).split())[:300]
            lost = f"rank {self.index} of {self.size} learner ranks lost another one in {what}"
            raise LongstrideError(f"{lost}: {reason}") from error


def deal(costs: Sequence[int], num_ranks: int) -> list[int]:
    """Return the rank of each item: the dearest first, each to the rank that has least so far."""
    loads = [(0, rank) for rank in range(num_ranks)]
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, owners[index] = loads[0]
        heapq.heapreplace(loads, (load + costs[index], owners[index]))
    return owners
