"""Numbers that are none: weights with them are neither served nor saved."""

import torch
from torch import Tensor

from common.errors import ConfigError


class WeightsNotFinite(ConfigError):
    """Weights are NaN or infinite.

    A learner that was started again would come to the same ones, so the run ends: exit code 2.
    """

    def __init__(self, name: str, what: str) -> None:
        """Say which tensor it is and what was to be done with it."""
        super().__init__(
            f"{name} has numbers that are NaN or infinite; {what}. The newest checkpoint is from"
            " before; a lower learner.lr or learner.max_grad_norm may help"
        )


class TrainingDiverged(ConfigError):
    """Losses, gradients or weights were not finite, and went on like that.

    A learner that was started again would repeat the same steps, so the run ends: exit code 2.
    """


@torch.no_grad()
def is_finite(tensor: Tensor) -> bool:
    """Return whether all numbers of a tensor are; integers always are. Takes no memory."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    ends = torch.stack(torch.aminmax(tensor))  # NaN if any number is
    return bool(torch.isfinite(ends).all())
