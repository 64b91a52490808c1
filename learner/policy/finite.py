"""Guards against NaN and infinity: such weights are neither published nor saved."""

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
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    ends = torch.stack(torch.aminmax(tensor))  # Both ends are NaN if any number is.
    return bool(torch.isfinite(ends).all())
