"""Muon in fp32: torch's rounds to bf16, which a CPU without units for it does 30 times slower."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5
EPS = 1e-7


class ExactMuon(torch.optim.Muon):
    """`torch.optim.Muon` with its state and its defaults; only the iteration is not rounded.

    Source: Jordan et al., 2024.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient; a closure is of no use here."""
        for group in self.param_groups:
            lr, momentum = float(group["lr"]), group["momentum"]
            for parameter in group["params"]:
                if (gradient := parameter.grad) is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(gradient)
                mean = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
                update = orthogonalised(gradient.lerp(mean, momentum))
                num_rows, num_columns = parameter.shape
                parameter.mul_(1 - lr * group["weight_decay"])
                scale = lr * math.sqrt(max(1.0, num_rows / num_columns))
                parameter.add_(update.to(parameter.dtype), alpha=-scale)


def orthogonalised(matrix: Tensor) -> Tensor:
    """Return a matrix [rows, columns] with its singular values brought to about 1, fp32."""
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.float().T if is_tall else matrix.float()
    wide = wide / wide.norm().clamp(min=EPS)
    for _ in range(NUM_ITERATIONS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if is_tall else wide
