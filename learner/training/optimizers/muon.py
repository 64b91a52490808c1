"""Muon variants beside torch's own: many matrices at once, and stacks of expert matrices.

torch.optim.Muon rounds to bf16, which is 30 times slower on a CPU without bf16 units.
"""
# torch's type stubs do not export its operations on lists of tensors:
# pyright: reportPrivateImportUsage=false

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5
EPS = 1e-7
# Largest number of elements to orthogonalise at once; the copies take memory.
MAX_NUMBERS = 1 << 26
MAX_CPU_NUMBERS = 1 << 22

_torch: Any = torch  # The stubs lack the functions of several tensors.


class BatchedMuon(torch.optim.Muon):
    """`torch.optim.Muon` with the same state and defaults; matrices of equal size iterate together.

    A GPU computes the small products of one matrix in less time than their kernels take to start.
    On a CPU the iteration is in fp32.

    Source: Jordan et al., 2024.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient; `closure` is ignored."""
        for group in self.param_groups:
            trained = [each for each in group["params"] if each.grad is not None]
            for chosen in batches_of(trained):
                self._update(chosen, group)

    def _update(self, chosen: list[Tensor], group: dict[str, Any]) -> None:
        """Update matrices of one size and device."""
        lr = float(group["lr"])
        momentum = group["momentum"]
        gradients = [each.grad for each in chosen if each.grad is not None]
        for parameter, gradient in zip(chosen, gradients, strict=True):
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(gradient)
        means = [self.state[each]["momentum_buffer"] for each in chosen]
        directions = _moved(means, gradients, momentum)
        num_rows, num_columns = chosen[0].shape
        scale = lr * math.sqrt(max(1.0, num_rows / num_columns))
        _torch._foreach_mul_(chosen, 1 - lr * group["weight_decay"])
        updates = all_orthogonalised(directions, arithmetic_of(chosen[0]))
        _torch._foreach_add_(
            chosen,
            [each.to(own.dtype) for each, own in zip(updates, chosen, strict=True)],
            alpha=-scale,
        )


def _moved(means: list[Tensor], gradients: list[Tensor], momentum: float) -> list[Tensor]:
    """Move the means towards the gradients; return the directions of Nesterov's momentum."""
    if isinstance(means[0], DTensor):  # torch 2.11 has no such operation on a list of DTensors.
        return [
            gradient.lerp(mean.lerp_(gradient, 1 - momentum), momentum)
            for mean, gradient in zip(means, gradients, strict=True)
        ]
    _torch._foreach_lerp_(means, gradients, 1 - momentum)
    return _torch._foreach_lerp(gradients, means, momentum)


def batches_of(matrices: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the matrices in batches of one size, dtype and device, small enough for the memory.

    A matrix that several ranks share is alone: its products need all ranks.
    """
    alike: dict[Any, list[Tensor]] = {}
    for number, each in enumerate(matrices):
        is_shared = isinstance(each, DTensor)
        key = number if is_shared else (each.shape, each.dtype, each.device)
        alike.setdefault(key, []).append(each)
    for own in alike.values():
        limit = MAX_NUMBERS if own[0].is_cuda else MAX_CPU_NUMBERS
        size = max(1, limit // max(1, own[0].numel()))
        for start in range(0, len(own), size):
            yield own[start : start + size]


def all_orthogonalised(matrices: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    """Return `orthogonalised` of matrices [rows, columns] of one size, computed together."""
    if len(matrices) == 1:
        return [orthogonalised(matrices[0], dtype)]
    return orthogonalised(torch.stack([each.to(dtype) for each in matrices]), dtype).unbind(0)


def arithmetic_of(weights: Tensor) -> torch.dtype:
    """Return the dtype of the iteration: bf16 on a GPU, as torch's own Muon."""
    return torch.float32 if weights.device.type == "cpu" else torch.bfloat16


class ExpertMuon(torch.optim.Optimizer):
    """Muon on stacks of matrices [expert, rows, columns]: each matrix is orthogonalised alone.

    FSDP shards a stack along its experts, so each rank has whole matrices and updates its own.

    Source: Jordan et al., 2024.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        weight_decay: float,
        momentum: float = 0.95,
    ) -> None:
        """Take groups with `params` and `is_transposed`: matrices are [in, out], not [out, in]."""
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every stack that has a gradient; `closure` is ignored."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """Update the experts of a stack that this rank owns."""
        lr = float(group["lr"])
        momentum = group["momentum"]
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        gradient = _own_experts(grad)
        mean = _own_experts(state["momentum_buffer"]).lerp_(gradient, 1 - momentum)
        num_rows, num_columns = parameter.shape[1:]
        ratio = num_columns / num_rows if group["is_transposed"] else num_rows / num_columns
        weights = _own_experts(parameter)
        weights.mul_(1 - lr * group["weight_decay"])
        size = max(1, MAX_NUMBERS // (num_rows * num_columns))  # Number of experts at once.
        dtype = arithmetic_of(weights)
        for own, direction in zip(
            weights.split(size), gradient.lerp(mean, momentum).split(size), strict=True
        ):
            if own.numel():
                update = orthogonalised(direction.to(dtype), dtype)
                own.add_(update.to(own.dtype), alpha=-lr * math.sqrt(max(1.0, ratio)))


def _own_experts(tensor: Tensor) -> Tensor:
    """Return this rank's experts of a stack."""
    if not isinstance(tensor, DTensor):
        return tensor
    assert all(each in (Shard(0), Replicate()) for each in tensor.placements)
    return tensor.to_local()


def orthogonalised(matrix: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return matrices [..., rows, columns] with their singular values moved to about 1.

    Args:
        matrix: one matrix, or a stack of matrices along one leading axis.
        dtype: dtype of the arithmetic and of the result.
    """
    a, b, c = COEFFICIENTS
    add = torch.addmm if matrix.ndim == 2 else torch.baddbmm
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    wide = matrix.to(dtype).mT if is_tall else matrix.to(dtype)
    wide = wide / wide.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(NUM_ITERATIONS):
        gram = wide @ wide.mT
        wide = add(wide, add(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.mT if is_tall else wide
