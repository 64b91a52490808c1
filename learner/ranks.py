"""The learner's ranks: each computes its share of a batch, and their gradients are summed."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Ranks:
    """A process group of learners that hold the same weights. One rank needs no group.

    Sample i belongs to rank i mod size. Losses are divided by the whole minibatch's counts, so
    the sum of the ranks' gradients is the gradient of one large batch.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """Wrap a group; None is a single rank."""
        self._group = group
        self.index = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def own(self, indices: Sequence[int]) -> list[int]:
        """Return the samples among `indices` that this rank computes.

        Raises:
            ValueError: there is none, so the ranks would wait for each other for ever.
        """
        own = [index for index in indices if index % self.size == self.index]
        if not own:
            raise ValueError(
                f"rank {self.index} of {self.size} has none of {len(indices)} samples; use fewer "
                "ranks or larger groups"
            )
        return own

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace every gradient by its sum over the ranks; a missing one counts as zero."""
        if self._group is None:
            return
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=self._group)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks of a tensor that has the same shape on each."""
        if self._group is not None:
            dist.all_reduce(values, group=self._group)
        return values
