"""Flash attention over packed sequences on CUDA: all sequences of a row in one kernel call."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
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
# Keys that one call of the kernel gets if sequences share rows; they are copied for the call.
GATHERED_KEYS = 2**18


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
        return f"attention computes in {dtype}, not in 16 bits (learner.precision=bf16)"
    if size > MAX_HEAD_SIZE:
        return f"a head has {size} numbers, more than {MAX_HEAD_SIZE}"
    return ""


@dataclass(frozen=True, slots=True)
class FlashCall:
    """The row and the formula of a kernel's call."""

    packing: Packing
    scaling: float = field(kw_only=True)
    # Keys up to its own that a query attends to; None: all.
    window: int | None = field(kw_only=True, default=None)

    @property
    def parts(self) -> Sequence[tuple[slice, "FlashCall"]]:
        """Calls for adjacent rows, each with a limited number of keys that it copies."""
        if self.packing.key_rows is None:
            return [(slice(0, sum(self.packing.lengths)), self)]
        divided = self.packing.divided(GATHERED_KEYS)
        return [(rows, replace(self, packing=packing)) for rows, packing in divided]

    @property
    def span(self) -> tuple[int, int]:
        """The keys to the left and to the right of a query's own that it attends to."""
        return CAUSAL if self.window is None else (self.window - 1, 0)

    @property
    def bounds(self) -> tuple[Tensor, Tensor, int, int]:
        """The starts of queries and of keys, and upper bounds of both lengths."""
        packing = self.packing
        lengths = (packing.max_length, packing.max_key_length)
        return packing.bounds, packing.key_bounds, *lengths


def flash(
    query: Tensor, key: Tensor, value: Tensor, call: FlashCall, *, sinks: Tensor | None = None
) -> Tensor:
    """Return causal attention [row, head, size of a value].

    Without shared rows this is one call of the kernel.

    Args:
        query: [row, head, size].
        key: [row, kv_head, size].
        value: [row, kv_head, size], whose size may differ.
        sinks: [head] score of a further key of every query, whose value is zero; None: none.
    """
    size = value.shape[-1]
    widest = max(query.shape[-1], size)
    padded = -(-widest // HEAD_MULTIPLE) * HEAD_MULTIPLE
    rows = [_widened(each, padded) for each in (query, key, value)]
    group = query.shape[1] // key.shape[1]
    is_grouped = group > 1 and _takes(varlen_attn, "enable_gqa")
    if group > 1 and not is_grouped:  # The kernel gets a copy of a key for each head.
        rows[1:] = (each.repeat_interleave(group, 1) for each in rows[1:])
    if sinks is not None or call.packing.key_rows is not None:
        out = _Flash.apply(*rows, sinks, call)
    else:
        grouping: dict[str, Any] = {"enable_gqa": True} if is_grouped else {}
        query, key, value = rows
        starts, key_starts, length, key_length = call.bounds
        out = varlen_attn(
            query,
            key,
            value,
            starts,
            key_starts,
            length,
            key_length,
            scale=call.scaling,
            window_size=call.span,
            **grouping,
        )
    assert isinstance(out, Tensor)  # No other output was requested.
    return out if size == padded else out[..., :size]


def _widened(rows: Tensor, size: int) -> Tensor:
    """Return rows with zeros after each head; zeros change no product of query and key."""
    missing = size - rows.shape[-1]
    return F.pad(rows, (0, missing)) if missing else rows


class _Flash(torch.autograd.Function):
    """Flash attention with sinks, or over sequences that share rows.

    A sink is a further key without a value in the softmax. The kernel returns the logarithm of the
    sum of exponentials. With the sink's exponential in this sum, its own backward pass computes the
    gradients: it needs the sum and the output only.

    Shared keys are copied for each sequence, a limited number at a time. The backward pass copies
    them again, so memory holds one copy of them for each layer. It adds their gradients in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, call: FlashCall
    ) -> Tensor:
        """Return [row, head, size]."""
        outs: list[Tensor] = []
        sums: list[Tensor] = []  # [head, row]
        ctx.states = []
        for rows, part in call.parts:
            out, of_rows, *state = flash_forward(
                query[rows], *_keys_of(part, rows, key, value), part
            )
            outs.append(out)
            sums.append(of_rows)
            ctx.states.append(state)
        whole = torch.cat(outs) if len(outs) > 1 else outs[0]
        logs = torch.cat(sums, 1) if len(sums) > 1 else sums[0]
        if sinks is not None:
            both = torch.logaddexp(logs, sinks.to(logs.dtype)[:, None])
            whole = whole * torch.exp(logs - both).T[..., None].to(whole.dtype)
            logs = both
        ctx.save_for_backward(query, key, value, sinks, whole, logs)
        ctx.call = call
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients of query, key, value and sinks."""
        query, key, value, sinks, out, logs = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_query = torch.empty_like(query)
        is_shared = ctx.call.packing.key_rows is not None
        wide = torch.float32 if is_shared else key.dtype
        of_key, of_value = (torch.zeros_like(each, dtype=wide) for each in (key, value))
        for (rows, part), state in zip(ctx.call.parts, ctx.states, strict=True):
            inputs = (query[rows], *_keys_of(part, rows, key, value))
            of_rows = logs[:, rows].contiguous()
            of_query[rows], *of_keys = flash_backward(
                gradient[rows], inputs, out[rows], of_rows, state, part
            )
            places = part.packing.key_rows
            for total, of_part in zip((of_key, of_value), of_keys, strict=True):
                if places is None:
                    total[rows] += of_part
                else:
                    total.index_add_(0, places, of_part.to(wide))
        gradients = (of_query, of_key.to(key.dtype), of_value.to(value.dtype))
        if sinks is None:
            return *gradients, None, None
        shares = torch.exp(sinks.to(logs.dtype)[:, None] - logs)  # [head, row]
        inner = (gradient * out).sum(-1, dtype=logs.dtype).T
        return *gradients, -(shares * inner).sum(1).to(sinks.dtype), None


def _keys_of(call: FlashCall, rows: slice, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and the values of the queries in `rows`."""
    places = call.packing.key_rows
    if places is None:
        return key[rows], value[rows]
    return key.index_select(0, places), value.index_select(0, places)


def flash_forward(query: Tensor, key: Tensor, value: Tensor, call: FlashCall) -> tuple[Tensor, ...]:
    """Return the output, the logarithms [head, query] of sums, and the kernel's random state."""
    left, right = call.span
    out, sums, *state, _ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        *call.bounds,
        0.0,  # Rate of dropout.
        call.window is None,
        return_debug_mask=False,
        scale=call.scaling,
        window_size_left=left,
        window_size_right=right,
    )
    return out, sums, *state


def flash_backward(
    gradient: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    sums: Tensor,
    state: Sequence[Tensor],
    call: FlashCall,
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value, the `rows`."""
    left, right = call.span
    return torch.ops.aten._flash_attention_backward(
        gradient,
        *rows,
        out,
        sums,
        *call.bounds,
        0.0,  # Rate of dropout.
        call.window is None,
        *state,
        scale=call.scaling,
        window_size_left=left,
        window_size_right=right,
    )


@cache
def _takes(kernel: Callable[..., Any], name: str) -> bool:
    """Return whether a function has a parameter; torch 2.11 has no grouped heads here."""
    return name in inspect.signature(kernel).parameters
