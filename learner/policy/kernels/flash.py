"""Flash attention over packed sequences on CUDA: all sequences of a row in one kernel call."""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from learner.batch.packing import Packing

MIN_CAPABILITY = (8, 0)
DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_SIZE = 256
HEAD_MULTIPLE = 8  # The kernel accepts head sizes that are multiples of this number.
NO_CUDA = "the device has no CUDA"  # The expected reason on a CPU.
CAUSAL = (-1, 0)  # Window of keys to the left and to the right of a query; -1 has no limit.


def flash_problem(query: Tensor, value: Tensor) -> str:
    """Return the reason why flash attention cannot compute these tensors; "" if it can.

    Args:
        query: [..., size] in the dtype of the computation.
        value: [..., size], whose size may differ.
    """
    size = max(query.shape[-1], value.shape[-1])
    return _device_problem(query.device) or _format_problem(query.dtype, size)


@cache
def _device_problem(device: torch.device) -> str:
    """Return why flash attention cannot run on a device; "" if it can."""
    if device.type != "cuda":
        return NO_CUDA
    if not torch.backends.cuda.is_flash_attention_available():
        return f"torch {torch.__version__} was built without flash attention"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        least = ".".join(map(str, MIN_CAPABILITY))
        present = ".".join(map(str, capability))
        return f"the GPU has compute capability {present}, below {least}"
    return ""


def _format_problem(dtype: torch.dtype, size: int) -> str:
    """Return why flash attention does not support a dtype or a head's size; "" if it does."""
    if dtype not in DTYPES:
        return f"attention computes in {dtype}, not in bf16 (learner.precision=bf16)"
    if size > MAX_HEAD_SIZE:
        return f"a head has {size} numbers, more than {MAX_HEAD_SIZE}"
    return ""


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    *,
    scaling: float,
    window: int | None = None,
) -> Tensor:
    """Return causal attention [query, head, size of a value] in one kernel call.

    Args:
        query: [query, head, size].
        key: [key, kv_head, size].
        value: [key, kv_head, size], whose size may differ.
        window: number of keys up to its own that a query attends to; None: all.
    """
    size = value.shape[-1]
    widest = max(query.shape[-1], size)
    padded = -(-widest // HEAD_MULTIPLE) * HEAD_MULTIPLE
    rows = [_widened(each, padded) for each in (query, key, value)]
    out = _call(varlen_attn, rows, packing, scaling, window)
    return out if size == padded else out[..., :size]


def _widened(rows: Tensor, size: int) -> Tensor:
    """Return rows with zeros after each head; zeros change no product of query and key."""
    missing = size - rows.shape[-1]
    return F.pad(rows, (0, missing)) if missing else rows


def _call(
    kernel: Callable[..., Any],
    rows: list[Tensor],
    packing: Packing,
    scaling: float,
    window: int | None,
) -> Tensor:
    """Call the kernel of this torch; without grouped heads it gets a copy of a key for each."""
    query, key, value = rows
    group = query.shape[1] // key.shape[1]
    grouping: dict[str, Any] = {}
    if group > 1 and _takes(kernel, "enable_gqa"):
        grouping["enable_gqa"] = True
    elif group > 1:
        key, value = (each.repeat_interleave(group, 1) for each in (key, value))
    out = kernel(
        query,
        key,
        value,
        packing.bounds,
        packing.key_bounds,
        packing.max_length,
        packing.max_key_length,
        scale=scaling,
        window_size=CAUSAL if window is None else (window - 1, 0),
        **grouping,
    )
    assert isinstance(out, Tensor)  # No other output was requested.
    return out


@cache
def _takes(kernel: Callable[..., Any], name: str) -> bool:
    """Return whether a function has a parameter; torch 2.11 has no grouped heads here."""
    return name in inspect.signature(kernel).parameters
