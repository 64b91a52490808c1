"""Attention of packed sequences by plain matrix products, each with several short sequences."""

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
        kept: list[Tensor] = []
        with torch.autocast(query.device.type, enabled=False):
            for block in blocks:
                asked = _by_head(block.queries.of(queries), kv_heads, query.shape[2])
                keys, values = _keys_and_values(block, both, kv_heads)
                scores = asked @ keys.transpose(1, 2)  # [piece * kv_head, query * group, key]
                _hide_later(scores, block, kv_heads)
                weights = torch.softmax(scores, -1)  # In fp32 internally.
                _write(out, block, _by_row(weights @ values, block.queries.shape))
                kept.append(weights)
        ctx.save_for_backward(queries, both, *kept)
        ctx.blocks, ctx.shapes = blocks, (query.shape, key.shape)
        return out.view(query.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients of query, key and value."""
        (queries, both, *kept), (shape, key_shape) = ctx.saved_tensors, ctx.shapes
        kv_heads, size = key_shape[1:]
        flat = gradient.flatten(1)
        of_query = torch.empty_like(flat)
        # Dtype in which the pieces are summed.
        wide = torch.promote_types(flat.dtype, torch.float32)
        of_both = flat.new_zeros((key_shape[0], 2 * kv_heads * size), dtype=wide)
        for block, weights in zip(ctx.blocks, kept, strict=True):
            asked = _by_head(block.queries.of(queries), kv_heads, size)
            keys, values = _keys_and_values(block, both, kv_heads)
            rows = block.queries.of(flat)
            if block.real is not None:
                rows = (rows.flatten(0, 1) * block.real[:, None]).view(rows.shape)
            own = _by_head(rows, kv_heads, size)
            of_weights = own @ values.transpose(1, 2)
            of_scores = torch.ops.aten._softmax_backward_data(
                of_weights, weights, -1, weights.dtype
            )
            _write(of_query, block, _by_row(of_scores @ keys, block.queries.shape))
            parts = (of_scores.transpose(1, 2) @ asked, weights.transpose(1, 2) @ own)
            _add(of_both, block, [_by_row(each, block.keys.shape) for each in parts])
        of_key, of_value = of_both.to(flat.dtype).view(-1, 2 * kv_heads, size).split(kv_heads, 1)
        return of_query.view(shape), of_key, of_value, None


def _by_head(rows: Tensor, kv_heads: int, size: int) -> Tensor:
    """Return [piece * kv_head, entry * group, size] from [piece, entry, head * size]."""
    num_pieces, num_entries, width = rows.shape
    apart = rows.view(num_pieces, num_entries, kv_heads, width // kv_heads).transpose(1, 2)
    return apart.reshape(num_pieces * kv_heads, -1, size)


def _by_row(found: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return [piece * entry, head * size] from the layout of `_by_head`."""
    num_pieces, num_entries = shape
    apart = found.view(num_pieces, found.shape[0] // num_pieces, num_entries, -1).transpose(1, 2)
    return apart.reshape(num_pieces * num_entries, -1)


def _keys_and_values(block: PairBlock, both: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Return keys and values, [piece * kv_head, key, size] each, from [seq, 2 * kv_head * size]."""
    taken = block.keys.of(both)  # [piece, key, 2 * kv_head * size]
    apart = taken.view(*taken.shape[:2], 2, kv_heads, -1).permute(2, 0, 3, 1, 4)
    keys, values = apart.reshape(2, -1, taken.shape[1], apart.shape[-1])
    return keys, values


def _hide_later(scores: Tensor, block: PairBlock, kv_heads: int) -> None:
    num_pieces, num_queries = block.queries.shape
    apart = scores.view(num_pieces, kv_heads, num_queries, -1, scores.shape[-1])
    apart[..., block.first_hidden :] += block.later.to(scores.dtype)[:, None, :, None]


def _write(into: Tensor, block: PairBlock, rows: Tensor) -> None:
    """Write the real rows of [piece * query, width] to their positions in [seq, width]."""
    if block.queries.stretch is not None:
        into[block.queries.stretch] = rows
    elif block.real is None or block.real_rows is None:
        into.index_copy_(0, block.queries.index, rows)
    else:
        into.index_copy_(0, block.real_rows, rows[block.real])


def _add(into: Tensor, block: PairBlock, parts: Sequence[Tensor]) -> None:
    """Add the parts, [piece * key, width] each, side by side to their rows; filling adds 0."""
    rows = torch.cat([*parts], 1).to(into.dtype)
    if block.keys.stretch is not None:
        into[block.keys.stretch] += rows
    else:
        into.index_add_(0, block.keys.index, rows)
