"""Attention of packed sequences by plain matrix products."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from learner.batch.packing import PairBlock


class CausalProducts(torch.autograd.Function):
    """Softmax attention, one block of pieces at a time, see `PairBlock`."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        blocks: Sequence[PairBlock],
        cap: float | None,
        is_lean: bool,
    ) -> Tensor:
        """Return [seq, head, size of a value] for a scaled `query` [seq, head, size].

        Args:
            key, value: [seq, kv_head, size]. Each kv head serves a group of query heads. A value
                may have another size than a key.
            sinks: [head] score of a further key of every query, whose value is zero; None: none.
            cap: bound of scores, which approach it as a hyperbolic tangent; None: no bound.
            is_lean: compute the probabilities again in the backward pass instead of saving them.
        """
        kv_heads = key.shape[1]
        heads = query.shape[1]
        out = query.new_empty(query.shape[0], heads * value.shape[2])
        queries = query.flatten(1)
        both = torch.cat([key.flatten(1), value.flatten(1)], 1)
        ctx.blocks, ctx.cap = blocks, cap
        ctx.sizes = (heads, kv_heads, key.shape[2], value.shape[2])
        saved: list[Tensor] = []
        with torch.autocast(query.device.type, enabled=False):
            for block in blocks:
                asked = _by_head(queries[block.queries], kv_heads, query.shape[2])
                keys, values = _keys_and_values(block, both, ctx.sizes)
                weights = _weights(_capped(asked @ keys.transpose(1, 2), cap), block, sinks)
                num_queries = block.queries.stop - block.queries.start
                out[block.queries] = _by_row(weights[..., : keys.shape[1]] @ values, num_queries)
                if not is_lean:
                    saved.append(weights)
        ctx.save_for_backward(queries, both, sinks, *saved)
        return out.view(query.shape[0], heads, value.shape[2])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients of query, key, value and sinks."""
        queries, both, sinks, *saved = ctx.saved_tensors
        heads, kv_heads, size, value_size = ctx.sizes
        flat = gradient.flatten(1)
        of_query = torch.empty_like(queries)
        # Dtype in which the pieces are summed.
        wide = torch.promote_types(flat.dtype, torch.float32)
        of_both = flat.new_zeros(both.shape, dtype=wide)
        of_sinks = None if sinks is None else torch.zeros_like(sinks, dtype=wide)
        for index, block in enumerate(ctx.blocks):
            asked = _by_head(queries[block.queries], kv_heads, size)
            keys, values = _keys_and_values(block, both, ctx.sizes)
            of_out = _by_head(flat[block.queries], kv_heads, value_size)
            scores: Tensor | None = None
            if saved:
                weights = saved[index]
            else:
                scores = _capped(asked @ keys.transpose(1, 2), ctx.cap)
                weights = _weights(scores.clone(), block, sinks)
            shares = weights[..., : keys.shape[1]]
            of_weights = of_out @ values.transpose(1, 2)
            of_scores = torch.ops.aten._softmax_backward_data(of_weights, shares, -1, shares.dtype)
            if of_sinks is not None:
                of_rows = -weights[..., -1].to(wide) * (of_weights * shares).sum(-1, dtype=wide)
                of_sinks += of_rows.view(kv_heads, -1, heads // kv_heads).sum(1).flatten()
            if ctx.cap is not None:
                if scores is None:
                    scores = _capped(asked @ keys.transpose(1, 2), ctx.cap)
                of_scores = of_scores * (1 - (scores / ctx.cap) ** 2)
            num_queries = block.queries.stop - block.queries.start
            of_query[block.queries] = _by_row(of_scores @ keys, num_queries)
            parts = (of_scores.transpose(1, 2) @ asked, shares.transpose(1, 2) @ of_out)
            _add(of_both, block, [_by_row(each, keys.shape[1]) for each in parts])
        of_key, of_value = of_both.to(flat.dtype).split([kv_heads * size, kv_heads * value_size], 1)
        return (
            of_query.view(-1, heads, size),
            of_key.reshape(-1, kv_heads, size),
            of_value.reshape(-1, kv_heads, value_size),
            None if of_sinks is None or sinks is None else of_sinks.to(sinks.dtype),
            None,
            None,
            None,
        )


def _capped(scores: Tensor, cap: float | None) -> Tensor:
    """Return scores within a bound."""
    return scores if cap is None else torch.tanh(scores / cap) * cap


def _weights(scores: Tensor, block: PairBlock, sinks: Tensor | None) -> Tensor:
    """Return the probabilities of a block's keys, and of the sink as a last key.

    Args:
        scores: [kv_head, query * group, key], changed in place.
    """
    _hide(scores, block)
    if sinks is None:
        return torch.softmax(scores, -1)  # In fp32 internally.
    kv_heads, num_rows, _ = scores.shape
    of_heads = sinks.view(kv_heads, 1, -1)
    num_queries = block.queries.stop - block.queries.start
    of_rows = of_heads.expand(kv_heads, num_queries, -1).reshape(kv_heads, num_rows, 1)
    # The sinks keep their precision: a version publishes them in fp32.
    wide = torch.promote_types(scores.dtype, sinks.dtype)
    both = torch.cat([scores.to(wide), of_rows.to(wide)], -1)
    return torch.softmax(both, -1).to(scores.dtype)


def _by_head(rows: Tensor, kv_heads: int, size: int) -> Tensor:
    """Return [kv_head, entry * group, size] from [entry, head * size]."""
    num_entries, width = rows.shape
    apart = rows.view(num_entries, kv_heads, width // kv_heads).transpose(0, 1)
    return apart.reshape(kv_heads, -1, size)


def _by_row(products: Tensor, num_entries: int) -> Tensor:
    """Return [entry, head * size] from the layout of `_by_head`."""
    apart = products.view(products.shape[0], num_entries, -1).transpose(0, 1)
    return apart.reshape(num_entries, -1)


def _keys_and_values(
    block: PairBlock, both: Tensor, sizes: tuple[int, int, int, int]
) -> tuple[Tensor, Tensor]:
    """Return keys and values, [kv_head, key, size] each, from rows that hold both."""
    _, kv_heads, size, value_size = sizes
    taken = both[block.keys]  # [key, kv_head * (size + value_size)]
    parts = taken.split([kv_heads * size, kv_heads * value_size], 1)
    keys, values = (each.reshape(len(taken), kv_heads, -1).transpose(0, 1) for each in parts)
    return keys.contiguous(), values.contiguous()


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
