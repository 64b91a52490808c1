"""Attention of packed sequences by plain matrix products."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from learner.batch.packing import PairBlock


class CausalProducts(torch.autograd.Function):
    """Softmax attention, one block of pieces at a time, see `PairBlock`; saves probabilities."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[PairBlock]
    ) -> Tensor:
        """Return [seq, head, size] for a scaled `query` of that shape.

        `key` and `value` are [seq, kv_head, size]. Each kv head serves a group of query heads.
        """
        out = query.new_empty(query.shape[0], query[0].numel())
        kv_heads = key.shape[1]
        queries = query.flatten(1)
        both = torch.cat([key, value], 1).flatten(1)
        saved: list[Tensor] = []
        with torch.autocast(query.device.type, enabled=False):
            for block in blocks:
                asked = _by_head(queries[block.queries], kv_heads, query.shape[2])
                keys, values = _keys_and_values(block, both, kv_heads)
                scores = asked @ keys.transpose(1, 2)  # [kv_head, query * group, key]
                _hide(scores, block)
                weights = torch.softmax(scores, -1)  # In fp32 internally.
                num_queries = block.queries.stop - block.queries.start
                out[block.queries] = _by_row(weights @ values, num_queries)
                saved.append(weights)
        ctx.save_for_backward(queries, both, *saved)
        ctx.blocks, ctx.shapes = blocks, (query.shape, key.shape)
        return out.view(query.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients of query, key and value."""
        (queries, both, *saved), (shape, key_shape) = ctx.saved_tensors, ctx.shapes
        kv_heads, size = key_shape[1:]
        flat = gradient.flatten(1)
        of_query = torch.empty_like(flat)
        # Dtype in which the pieces are summed.
        wide = torch.promote_types(flat.dtype, torch.float32)
        of_both = flat.new_zeros((key_shape[0], 2 * kv_heads * size), dtype=wide)
        for block, weights in zip(ctx.blocks, saved, strict=True):
            asked = _by_head(queries[block.queries], kv_heads, size)
            keys, values = _keys_and_values(block, both, kv_heads)
            of_out = _by_head(flat[block.queries], kv_heads, size)
            of_weights = of_out @ values.transpose(1, 2)
            of_scores = torch.ops.aten._softmax_backward_data(
                of_weights, weights, -1, weights.dtype
            )
            num_queries = block.queries.stop - block.queries.start
            of_query[block.queries] = _by_row(of_scores @ keys, num_queries)
            parts = (of_scores.transpose(1, 2) @ asked, weights.transpose(1, 2) @ of_out)
            _add(of_both, block, [_by_row(each, keys.shape[1]) for each in parts])
        of_key, of_value = of_both.to(flat.dtype).view(-1, 2 * kv_heads, size).split(kv_heads, 1)
        return of_query.view(shape), of_key, of_value, None


def _by_head(rows: Tensor, kv_heads: int, size: int) -> Tensor:
    """Return [kv_head, entry * group, size] from [entry, head * size]."""
    num_entries, width = rows.shape
    apart = rows.view(num_entries, kv_heads, width // kv_heads).transpose(0, 1)
    return apart.reshape(kv_heads, -1, size)


def _by_row(products: Tensor, num_entries: int) -> Tensor:
    """Return [entry, head * size] from the layout of `_by_head`."""
    apart = products.view(products.shape[0], num_entries, -1).transpose(0, 1)
    return apart.reshape(num_entries, -1)


def _keys_and_values(block: PairBlock, both: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Return keys and values, [kv_head, key, size] each, from [seq, 2 * kv_head * size]."""
    taken = both[block.keys]  # [key, 2 * kv_head * size]
    apart = taken.view(taken.shape[0], 2, kv_heads, -1).permute(1, 2, 0, 3)
    keys, values = apart.contiguous()
    return keys, values


def _hide(scores: Tensor, block: PairBlock) -> None:
    """Add -inf to the scores of keys that a query must not attend to."""
    num_queries = block.queries.stop - block.queries.start
    apart = scores.view(scores.shape[0], num_queries, -1, scores.shape[-1])
    apart[..., block.num_earlier :] += block.hidden.to(scores.dtype)[:, None]


def _add(into: Tensor, block: PairBlock, parts: Sequence[Tensor]) -> None:
    """Add the parts, [key, width] each, side by side to the rows of their keys."""
    rows = torch.cat([*parts], 1).to(into.dtype)
    if isinstance(block.keys, slice):
        into[block.keys] += rows
    else:
        into.index_add_(0, block.keys, rows)
