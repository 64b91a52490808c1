"""Moves the arrays of a microbatch to the device in one copy that the host does not wait for."""
# torch's type stubs lack numpy's element types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

ALIGN_BYTES = 16  # Every array starts at a multiple of this, so a view of any dtype is legal.


def placed(arrays: Mapping[str, np.ndarray], device: torch.device | str) -> dict[str, Tensor]:
    """Return arrays as tensors on a device, by the same names.

    On a CPU they share the memory of the arrays. Other devices get one copy of all bytes: a copy
    from ordinary memory would wait for all earlier work of a GPU, so the bytes are in pinned memory
    there.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    starts: dict[str, int] = {}
    total = 0
    for name, array in arrays.items():
        starts[name] = total
        total += -(-array.nbytes // ALIGN_BYTES) * ALIGN_BYTES
    host = torch.empty(total, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = host.numpy()
    for name, array in arrays.items():
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        target[starts[name] : starts[name] + flat.size] = flat
    moved = host.to(device, non_blocking=True)
    return {
        name: _view(moved[starts[name] : starts[name] + array.nbytes], array)
        for name, array in arrays.items()
    }


def _view(part: Tensor, array: np.ndarray) -> Tensor:
    """Return a part of the copied bytes as a tensor like the array."""
    dtype = torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
    return part.view(dtype).view(array.shape)
