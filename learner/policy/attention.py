"""Attention over packed sequences: several in one row, none of which sees another.

Two kernels. *fused*: on CUDA flash attention over sequences of unlike lengths (in bf16), elsewhere
torch's scaled dot products, one sequence at a time. *products*: plain matrix products, which keep
the probabilities of every pair; on a CPU in bf16 they are the faster ones for short sequences.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel

from common.config.compute import Attention, Layout
from common.errors import ConfigError
from learner.batch.batching import Packing

CHUNK_TOKENS = 128  # queries whose scores are computed at once; later keys are left out
MIN_FLASH_CAPABILITY = (8, 0)
FUSED, PRODUCTS = "packed_fused", "packed_products"
_FULL = "full_attention"
Lengths = tuple[Sequence[int], Sequence[int]]
# What other families add to attention; each would have to be built into both kernels.
UNSUPPORTED = ("softcap", "s_aux", "position_bias", "sliding_window")


def packing_problem(network: nn.Module) -> str:
    """Return why sequences cannot be packed for the transformers in a network; "" if they can."""
    for model in _transformers(network):
        config = model.config
        kinds = set(getattr(config, "layer_types", None) or [_FULL]) - {_FULL}
        if kinds:
            return f"{config.model_type} has layers of {', '.join(sorted(kinds))}"
        if not model._supports_attention_backend:
            return f"{type(model).__name__} has attention of its own"
    return ""


def attention_by_rule(device_type: str) -> Attention:
    """Return what is used where nothing was timed, the same on every start."""
    return Attention.FUSED if device_type == "cuda" else Attention.PRODUCTS


def use_attention(
    networks: Sequence[nn.Module], device_type: str, layout: Layout, attention: Attention
) -> bool:
    """Let all transformers in networks compute attention so; auto follows the rules.

    Returns: whether sequences are to be packed.

    Raises: ConfigError: they are to be, and cannot.
    """
    problem = next((text for text in map(packing_problem, networks) if text), "")
    if problem and layout is Layout.PACKED:
        raise ConfigError(f"learner.layout=packed: {problem}; take learner.layout=padded")
    is_packed = layout is not Layout.PADDED and not problem
    if attention is Attention.AUTO:
        attention = attention_by_rule(device_type)
    is_fused = attention is Attention.FUSED
    name = (FUSED if is_fused else PRODUCTS) if is_packed else ("sdpa" if is_fused else "eager")
    for network in networks:
        for model in _transformers(network):
            model.config._attn_implementation = name
    return is_packed


def _transformers(network: nn.Module) -> Iterator[PreTrainedModel]:
    return (each for each in network.modules() if isinstance(each, PreTrainedModel))


def _fused(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    packing: Packing | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return attention [1, seq, head, size]; without `packing`, each row is one sequence.

    Args:
        query: [1, head, seq, size].
        key: [1, kv_head, seq, size], as is `value`.
    """
    _refuse(module, others)
    if packing is not None and packing.key_rows is not None:
        key, value = (tensor.index_select(2, packing.key_rows) for tensor in (key, value))
    if packing is not None and _has_flash(query):
        rows = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]  # [seq, head, size]
        out = varlen_attn(
            rows[0],
            rows[1],
            rows[2],
            packing.bounds,
            packing.key_bounds,
            max(packing.lengths),
            max(packing.key_lengths),
            scale=scaling,
            window_size=(-1, 0),  # causal
            enable_gqa=query.shape[1] != key.shape[1],
        )
        assert isinstance(out, Tensor)  # nothing else was asked for
        return out[None], None
    queries, keys = [query.shape[2]], [query.shape[2]]
    if packing is not None:
        queries, keys = list(packing.lengths), list(packing.key_lengths)
    parts = [
        _one_fused(*each, scaling)
        for each in zip(
            query.split(queries, 2), key.split(keys, 2), value.split(keys, 2), strict=True
        )
    ]
    return torch.cat(parts, 2).transpose(1, 2), None


def _one_fused(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    num_queries, num_keys = query.shape[2], key.shape[2]
    mask = None  # of no prefix: the kernel knows what is causal
    if num_queries < num_keys:
        seen = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
        mask = seen.tril(num_keys - num_queries)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _has_flash(query: Tensor) -> bool:
    if query.device.type != "cuda" or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    is_new = torch.cuda.get_device_capability(query.device) >= MIN_FLASH_CAPABILITY
    return is_new and torch.backends.cuda.is_flash_attention_available()


def _products(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    packing: Packing | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return what `_fused` returns."""
    if packing is None:
        return _fused(module, query, key, value, attention_mask, scaling=scaling, **others)
    _refuse(module, others)
    device_type, dtype = query.device.type, query.dtype
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    _, heads, tokens, size = query.shape
    folded = (query * scaling).to(dtype).view(key.shape[1], -1, tokens, size)
    keys, values = (tensor[0].to(dtype) for tensor in (key, value))
    if packing.key_rows is not None:
        keys, values = (tensor.index_select(1, packing.key_rows) for tensor in (keys, values))
    out = _CausalProducts.apply(folded, keys, values, (packing.lengths, packing.key_lengths))
    assert isinstance(out, Tensor)
    return out.view(1, heads, tokens, size).transpose(1, 2), None


class _CausalProducts(torch.autograd.Function):
    """Attention of packed sequences, some queries at a time, each over the keys up to its own."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, keys: Tensor, values: Tensor, lengths: Lengths) -> Tensor:
        """Return [kv_head, group, seq, size].

        Args:
            query: [kv_head, group, seq, size], scaled.
            keys: [kv_head, key, size], as are `values`.
            lengths: of each sequence in queries, and in keys; it ends with both.
        """
        out = torch.empty_like(query)
        ctx.lengths = lengths
        probabilities: list[Tensor] = []
        with torch.autocast(query.device.type, enabled=False):
            hidden = _later_keys(query)
            for start, end, seen in _chunks(*lengths):
                rows, chunk = query[:, :, start:end], end - start  # [kv_head, group, chunk, size]
                shape = (*rows.shape[:3], seen.stop - seen.start)
                scores = (rows.flatten(1, 2) @ keys[:, seen].transpose(1, 2)).view(shape)
                scores[..., -chunk:] += hidden[:chunk, :chunk]
                weights = torch.softmax(scores, -1)  # in fp32 within
                probabilities.append(weights)
                found = weights.flatten(1, 2) @ values[:, seen]
                out[:, :, start:end] = found.view(rows.shape)
        ctx.save_for_backward(query, keys, values, *probabilities)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients of query, keys and values."""
        query, keys, values, *probabilities = ctx.saved_tensors
        of_query = torch.empty_like(query)
        wide = torch.promote_types(keys.dtype, torch.float32)  # chunks add up in it
        of_keys, of_values = (torch.zeros_like(each, dtype=wide) for each in (keys, values))
        chunks = zip(_chunks(*ctx.lengths), probabilities, strict=True)
        for (start, end, seen), weights in chunks:
            flat = weights.flatten(1, 2)  # [kv_head, group * chunk, keys]
            own = gradient[:, :, start:end].flatten(1, 2)
            of_values[:, seen] += flat.transpose(1, 2) @ own
            of_weights = own @ values[:, seen].transpose(1, 2)
            of_scores = torch.ops.aten._softmax_backward_data(of_weights, flat, -1, flat.dtype)
            of_query[:, :, start:end] = (of_scores @ keys[:, seen]).view(
                of_query[:, :, start:end].shape
            )
            of_keys[:, seen] += of_scores.transpose(1, 2) @ query[:, :, start:end].flatten(1, 2)
        return of_query, of_keys.to(keys.dtype), of_values.to(values.dtype), None


def _chunks(lengths: Sequence[int], key_lengths: Sequence[int]) -> Iterator[tuple[int, int, slice]]:
    """Yield (first query, end, keys up to the last one's own) of each chunk of a row."""
    first = first_key = 0
    for length, num_keys in zip(lengths, key_lengths, strict=True):
        for start in range(0, length, CHUNK_TOKENS):
            end = min(start + CHUNK_TOKENS, length)
            seen = slice(first_key, first_key + num_keys - length + end)
            yield first + start, first + end, seen
        first, first_key = first + length, first_key + num_keys


def _later_keys(like: Tensor) -> Tensor:
    """Return [chunk, chunk], minus infinity where a key comes after its query."""
    return like.new_full((CHUNK_TOKENS, CHUNK_TOKENS), float("-inf")).triu(1)


def _refuse(module: nn.Module, others: dict[str, Any]) -> None:
    present = [name for name in UNSUPPORTED if others.get(name) is not None]
    if present:
        raise ConfigError(
            f"learner.layout=packed: {type(module).__name__} has {', '.join(present)}; "
            "take learner.layout=padded"
        )


AttentionInterface.register(FUSED, _fused)
AttentionInterface.register(PRODUCTS, _products)
