"""Guards against NaN and infinity: such weights are neither published nor saved."""

from collections.abc import Sequence

import torch
from torch import Tensor

from common.errors import ConfigError


class WeightsNotFinite(ConfigError):
    """Weights are NaN or infinite.

    A restarted learner would reach the same weights, so the run ends: exit code 2.
    """

    def __init__(self, name: str, what: str) -> None:
        """Name the tensor and the operation that was refused."""
        super().__init__(
            f"{name} has NaN or infinite values, so {what}. The newest checkpoint is older and not"
            " affected. A lower learner.lr or learner.max_grad_norm may help."
        )


class TrainingDiverged(ConfigError):
    """Losses, gradients or weights were not finite in several steps in a row.

    A restarted learner would repeat the same steps, so the run ends: exit code 2.
    """


@torch.no_grad()
def is_finite(tensor: Tensor) -> bool:
    """Return whether all numbers of a tensor are finite; integers always are. Takes no memory."""
    return first_not_finite([tensor]) is None


@torch.no_grad()
def first_not_finite(tensors: Sequence[Tensor]) -> int | None:
    """Return the index of the first tensor with NaN or infinite numbers, None if there is none.

    Tensors on a GPU cost one wait for all of them, not one for each.
    """
    flags: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.is_floating_point() and tensor.numel():
            ends = torch.stack(torch.aminmax(tensor))  # Both ends are NaN if any number is.
            flags.setdefault(tensor.device, []).append((index, torch.isfinite(ends).all()))
    bad = [
        index
        for pairs in flags.values()
        for (index, _), is_good in zip(
            pairs, torch.stack([flag for _, flag in pairs]).cpu().tolist(), strict=True
        )
        if not is_good
    ]
    return min(bad, default=None)
