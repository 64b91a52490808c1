"""The learner's ranks: each computes its share of a batch, and their gradients are summed."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.errors import LongstrideError


class Ranks:
    """A process group of learners that hold the same weights. One rank needs no group.

    Sample i belongs to rank i mod size. Losses are divided by the whole minibatch's counts, so
    the sum of the ranks' gradients is the gradient of one large batch. A rank without a sample of
    a minibatch adds zeros to all sums.

    Raises:
        LongstrideError: another rank is gone, or did not answer within the group's timeout.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, device: torch.device | str = "cpu"
    ) -> None:
        """Wrap a group; None is a single rank. Tensors go over `device`: NCCL takes CUDA's only."""
        self._group = group
        self._device = torch.device(device)
        self.index = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()

    def own(self, indices: Sequence[int]) -> list[int]:
        """Return the samples among `indices` that this rank computes; perhaps none."""
        return [index for index in indices if index % self.size == self.index]

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace every gradient by its sum over the ranks; a missing one counts as zero."""
        if self._group is None:
            return
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self._sum_in_place(parameter.grad)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks of a tensor that has the same shape on each."""
        if self._group is None:
            return values
        summed = values.to(self._device, copy=True)
        self._sum_in_place(summed)
        return summed.to(values.device)

    def receive(self, num_bytes: int) -> Tensor:
        """Return the bytes [num_bytes] uint8 that rank 0 sends at this moment."""
        buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        self._broadcast(buffer)
        return buffer.cpu()

    def send(self, payload: Tensor) -> None:
        """As rank 0, send bytes [num_bytes] uint8 to all other ranks."""
        self._broadcast(payload.to(self._device))

    def _broadcast(self, buffer: Tensor) -> None:
        assert self._group is not None
        with self._in_touch("a batch"):
            self._group.broadcast([buffer], dist.BroadcastOptions()).wait()  # of rank 0

    def _sum_in_place(self, values: Tensor) -> None:
        assert self._group is not None
        with self._in_touch("a sum"):
            self._group.allreduce([values]).wait()

    @contextmanager
    def _in_touch(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:300]
            lost = f"rank {self.index} of {self.size} learner ranks lost another one in {what}"
            raise LongstrideError(f"{lost}: {reason}") from error
